"""The student stage: stream a cache, train a block stack that grows, evaluate and report."""

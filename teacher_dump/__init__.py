"""The teacher stage: text and a teacher in, a cache of top-k records (or of tokens alone) out."""

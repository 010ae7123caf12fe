"""What the teacher stage and the student stage share: the cache format, start-up and errors."""

"""`python -m teacher_dump`, which is also what `torchrun -m` and `deepspeed --module` start."""

from teacher_dump.cli import main

if __name__ == "__main__":
    main(prog_name="teacher-dump")

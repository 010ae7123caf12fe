"""python -m student_train"""

from student_train.cli import main

if __name__ == "__main__":
    main()

"""python -m student_train"""

from student_train.cli import main

main()

"""What a stage's exit code tells a shell, a batch script or Slurm (design section 8)."""

DONE = 0
FAULTS_FOUND = 1
USER_MISTAKE = 2
OUR_BUG = 70
CRASH = 74  # a fault outside: a full disk, a lost worker, storage; the same command continues
CONTINUE = 75  # stopped with a committed checkpoint; sites list it as RequeueExit
WILL_NOT_SUCCEED = 78
INTERRUPTED = 130  # by Ctrl-C, with nothing saved

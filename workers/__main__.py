"""`python -m workers` is the command `worker`."""

from workers.cli import main

if __name__ == "__main__":
    main()

"""`python -m producer` is the command `producer`."""

from producer.cli import main

if __name__ == "__main__":
    main()

"""python -m oscar_int2 doctor"""
import sys

from .doctor import report


def main(arguments):
    if arguments != ["doctor"]:
        print("usage: python -m oscar_int2 doctor    what this machine and this build can serve",
              file=sys.stderr)
        return 2
    text, usable = report()
    print(text)
    return 0 if usable else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

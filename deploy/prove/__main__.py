"""The command `penstock-prove` of the wheel of that name."""

import argparse
import sys

from penstock_prove import USER_ERRORS, add_arguments, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="penstock-prove", description="Find wrong answers of an inference server.")
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except KeyboardInterrupt:
        return 130
    except USER_ERRORS as error:
        print(f"penstock-prove: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

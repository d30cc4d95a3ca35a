"""What the differential tests share: the peer, the time they take, and how they end."""

import argparse
import json
import random
import subprocess
import sys
import time


class Peer:
    """kvzap_fuzz_peer: a request in, an answer out."""

    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **request):
        """kvzap's answer; ends the test if the peer dies of the request."""
        line = json.dumps(request)
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            sys.exit(f"the peer died of {line}")
        return json.loads(answer)


def parser(description):
    """The options that all differential tests have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("peer", help="the program kvzap_fuzz_peer")
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--cases", type=int, help="number of cases, the same ones each time, in place of a time")
    options.add_argument("--seed", type=int)
    return options


def seeded(options):
    """The command line and the seed; random numbers are the same each time where a number of cases is given."""
    given = options.parse_args()
    fixed = given.cases or getattr(given, "strings", None)
    seed = given.seed if given.seed is not None else (1 if fixed else random.randrange(2**31))
    random.seed(seed)
    return given, seed


def run(name, given, seed, one_case):
    """Calls one_case() until it is time; it returns whether kvzap took the case, or raises Difference."""
    end = time.monotonic() + given.seconds
    cases = taken = 0
    while cases < given.cases if given.cases else time.monotonic() < end:
        cases += 1
        try:
            taken += one_case()
        except Difference as difference:
            sys.exit(f"{name} (--seed {seed}): {difference}")
    print(f"{name}: {cases} cases, {taken} of which kvzap takes, no difference")


class Difference(Exception):
    """What the two make of one input differs."""

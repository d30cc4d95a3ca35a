"""Writes snapshots over older ones while calls of the system fail, or processes die at them: every call that
kvzap makes on the file, on each rank of 1, 2 and 4, with each kind of fault (io_faults.h). Prints what came of
it; exits with 1 if a file could not be read, an older snapshot was lost, or anything else broke a promise of
write_snapshot. See campaign.cpp.

    campaign.py PROGRAM [--every N] [--ranks 1,2,4] [--scenarios rows,map,compressed] [--folder DIR] [--jobs N]

PROGRAM is build/tests/kvzap_io_faults_campaign. --every N: every N-th call alone, another one with each kind of
fault, and on several ranks a third of the deaths, where the whole campaign would take too long. Files lie in the
system's memory if it has a file system there, for it is the calls that count, and disks are slow; --folder names
another place. ctest sets KVZAP_MPIEXEC and KVZAP_MPIEXEC_FLAGS.
"""
import argparse
import collections
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

MPIEXEC = os.environ.get("KVZAP_MPIEXEC", "mpirun")
FLAGS = os.environ.get(
    "KVZAP_MPIEXEC_FLAGS",
    "--oversubscribe --bind-to none --allow-run-as-root --mca mpi_yield_when_idle 1",
).split()
SCENARIOS = "rows,map,compressed"
PATIENCE = 3600  # seconds; ends what hangs
IN_MEMORY = "/dev/shm"
FELL_SHORT = 4  # exit status: the rank makes fewer calls

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "KOKKOS_DISABLE_WARNINGS": "1",
    # Open MPI waits a second between asking the other ranks of a dead one to end and making them.
    "OMPI_MCA_odls_base_sigkill_timeout": "0",
}


class Campaign:
    def __init__(self, options, folder):
        self.options = options
        self.folder = pathlib.Path(folder).resolve()
        self.counts = collections.Counter()
        self.complaints = []
        self.lock = threading.Lock()

    def run(self, ranks, *arguments):
        """One run of the program; its exit status."""
        command = [self.options.program, *map(str, arguments)]
        if MPIEXEC:
            command = [MPIEXEC, *FLAGS, "-n", str(ranks), *command]
        # Ranks that die leave their part of the memory that Open MPI shares.
        environment = {**ENVIRONMENT, "OMPI_MCA_btl_vader_backing_directory": str(self.folder)}
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
            timeout=PATIENCE,
        )  # fmt: skip
        with self.lock:
            for line in done.stdout.decode().splitlines():
                if line.startswith("counts:"):
                    for field in line.split()[1:]:
                        name, value = field.split("=")
                        self.counts[name] += int(value)
        return done

    def complain(self, what, done):
        with self.lock:
            lines = [line for line in done.stderr.decode(errors="replace").splitlines() if "campaign:" in line]
            self.complaints.append("\n  ".join([f"{what}: exit status {done.returncode}", *lines]))

    def fail(self, folder, ranks, scenario):
        done = self.run(ranks, "fail", folder, scenario, self.options.every)
        if done.returncode != 0:
            self.complain(f"failing calls, {scenario}, {ranks} ranks", done)

    def kill(self, folder, ranks, scenario, fault, rank, first):
        """Each run looks at what the one before has left, and then dies itself."""
        call = first
        while True:
            done = self.run(ranks, "kill", folder, scenario, fault, rank, call)
            what = f"death ({fault}) at call {call} of rank {rank}, {scenario}, {ranks} ranks"
            if b"campaign:" in done.stderr or b"counts:" not in done.stdout:
                self.complain(what, done)
                return
            if done.returncode == FELL_SHORT:
                return
            call += self.options.every

    def all(self):
        jobs, phase = [], 0
        for ranks in self.options.ranks:
            for scenario in self.options.scenarios:
                jobs.append((self.fail, ranks, scenario))
                for fault in ("kill", "torn"):
                    for rank in range(ranks if ranks > 1 else 0):  # one rank: by fork, in self.fail
                        phase += 1
                        # Starting ranks takes much longer than writing.
                        if self.options.every == 1 or phase % 3 == 0:
                            jobs.append((self.kill, ranks, scenario, fault, rank, 1 + phase % self.options.every))
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            futures = []
            for i, (job, *arguments) in enumerate(jobs):
                own = self.folder / str(i)
                own.mkdir()
                futures.append(pool.submit(job, own, *arguments))
            for future in concurrent.futures.as_completed(futures):
                future.result()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default="1,2,4")
    parser.add_argument("--scenarios", type=lambda text: text.split(","), default=SCENARIOS)
    parser.add_argument("--folder", default=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None)
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1))
    options = parser.parse_args()
    if not MPIEXEC:
        options.ranks = [1]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvzap-io-faults-", dir=options.folder) as folder:
        campaign = Campaign(options, folder)
        campaign.all()
    counts = campaign.counts
    print(f"{counts['faults']} faults in {time.monotonic() - begin:.0f} s:")
    print(f"  {counts['failed']} made a write fail, on all ranks with the same message; "
          f"{counts['survived']} it got over")
    print(f"  {counts['deaths']} ended a process: {counts['deaths_old']} times the older snapshot was there, "
          f"{counts['deaths_new']} times the new one")
    print(f"  {counts['deaths_with_temporary']} of these left a temporary file, which the next write removed and told")
    print(f"  {counts['unreadable']} unreadable files, {counts['lost']} lost snapshots, "
          f"{counts['violations']} broken promises in all")
    for complaint in campaign.complaints:
        print(complaint, file=sys.stderr)
    return 1 if campaign.complaints or counts["violations"] or not counts["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())

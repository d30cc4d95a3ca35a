"""kvzap run --snapshot while the system's calls fail, or the program dies at them: a few of what
tests/io_faults tries one by one, here with the program as users have it. ctest sets KVZAP_IO_FAULTS
(the library that is preloaded)."""
import os
import unittest

from harness import HAVE_HDF5, KVZAP, MLP, MODEL, TestCase, kvzap, on_ranks, run_command

IO_FAULTS = os.environ.get("KVZAP_IO_FAULTS", "")
CONTEXT = " ".join(f"The code of box {i} is {i * 37 % 101}." for i in range(30))


@unittest.skipUnless(HAVE_HDF5 and IO_FAULTS, "needs HDF5 and the library of faults")
class Faults(TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.folder.resolve()
        self.kept = self.folder / "kept"
        self.kept.mkdir()
        self.file = self.kept / "cache.h5"
        self.log = self.folder / "calls"

    def run_kvzap(self, *arguments, ranks=1, fault=None, call=0, rank=0):
        """One run that writes the file; `call` 0: without fault, and self.calls becomes what `rank` called."""
        self.log.unlink(missing_ok=True)
        # Snapshots say when they were written.
        settings = ["SOURCE_DATE_EPOCH=1"]
        settings += [f"LD_PRELOAD={IO_FAULTS}", f"KVZAP_IO_FAULTS_FOLDER={self.kept}", f"KVZAP_IO_FAULTS_LOG={self.log}"]
        settings += [f"KVZAP_IO_FAULTS_{k}={v}" for k, v in (("FAULT", fault or "eio"), ("CALL", call), ("RANK", rank))]
        command = [KVZAP, "run", "-m", MODEL, "--surrogate", MLP, "--threshold", "-3.4", "-q"]
        command += ["--snapshot", self.file, *arguments]
        result = run_command(on_ranks(ranks, ["env", *settings, *command]))
        calls = [line.split() for line in self.log.read_text().splitlines()] if self.log.exists() else []
        if not call:
            self.assertEqual(result.code, 0, result)
            self.calls = [(name, file) for _, name, file in calls]
            # The check before the run, and then a snapshot.
            self.assertIn("rename" if rank == 0 else "fsync", [name for name, _ in self.calls])
        else:
            self.assertEqual([c[0] for c in calls if c[-1] == fault][:1], [str(call)], "the fault did not happen")
        return result

    def interesting_calls(self, n):
        """Numbers of calls: the last of the kinds that matter, and others spread evenly."""
        chosen = {1 + (i * len(self.calls)) // n for i in range(n)}
        names = [name for name, _ in self.calls]
        for name in {"fsync", "rename", "pwrite", "link"} & set(names):
            chosen.add(len(names) - names[::-1].index(name))
        return sorted(chosen)

    def names(self):
        return sorted(path.name for path in self.kept.iterdir())

    def test_a_run_that_fails_keeps_the_older_snapshot(self):
        older = ["-p", CONTEXT, "-n", "0"]
        newer = ["-p", CONTEXT + " More.", "-n", "0"]
        for ranks, rank in ((1, 0), (2, 1)):
            self.run_kvzap(*older, ranks=ranks)
            content = self.file.read_bytes()
            self.run_kvzap(*newer, ranks=ranks, rank=rank)
            calls, tried = self.interesting_calls(3), self.calls
            self.assertNotEqual(self.file.read_bytes(), content)
            self.run_kvzap(*older, ranks=ranks)
            for call in calls:
                with self.subTest(ranks=ranks, call=call, of=tried[call - 1]):
                    result = self.run_kvzap(*newer, ranks=ranks, rank=rank, call=call, fault="eio")
                    self.assertEqual(self.names(), ["cache.h5"])
                    if result.code == 0:  # what is only advice to the system, or done again
                        self.run_kvzap(*older, ranks=ranks)
                        continue
                    self.assertEqual(len(result.errors), 1, result)
                    self.assertIn(str(self.file), result.errors[0])
                    if tried[call - 1][1] == str(self.kept):  # the new name, which may not last
                        self.run_kvzap(*older, ranks=ranks)
                    self.assertEqual(self.file.read_bytes(), content)

    def test_a_run_that_dies_leaves_whole_snapshots_alone(self):
        options = ["-p", CONTEXT, "--question", "Which box?", "-n", "12"]
        options += ["--snapshot-every", "8", "--snapshot-keep", "3"]
        for ranks, rank in ((1, 0), (2, 1)):
            self.run_kvzap(*options, ranks=ranks, rank=rank)
            for i, call in enumerate(self.interesting_calls(4 if ranks == 1 else 2)):
                with self.subTest(ranks=ranks, call=call):
                    result = self.run_kvzap(
                        *options, ranks=ranks, rank=rank, call=call, fault=("kill", "torn")[i % 2]
                    )
                    self.assertNotEqual(result.code, 0, result)
                    left = [name for name in self.names() if ".tmp-" in name]
                    self.assertLessEqual(len(left), 1)
                    self.assertIn("cache.h5", self.names())
                    for name in set(self.names()) - set(left):
                        whole = run_command([KVZAP, "inspect", "--verify", self.kept / name])
                        self.assertEqual(whole.code, 0, whole)
                    if left:
                        result = kvzap("-m", MODEL, "-p", "x", "-n", "0", "--snapshot", self.file)
                        self.assertIn(f"removed {self.kept / left[0]}", result.err.decode())
                    self.assertFalse([name for name in self.names() if ".tmp-" in name])


if __name__ == "__main__":
    unittest.main()

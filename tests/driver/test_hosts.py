"""Ranks on several hosts: namespaces of this machine, with a network between them (hosts.sh)."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import unittest

from harness import FLAGS, HAVE_HDF5, KVZAP, MODEL, MPIEXEC, PATIENCE, SOURCE, TestCase, descendants, run_command, running

SCRIPT = pathlib.Path(__file__).parent / "hosts.sh"
GOLDEN = os.environ.get("KVZAP_GOLDEN_TESTS", str(pathlib.Path(KVZAP).parent / "tests/kvzap_golden_tests"))
HEADS = 4  # of the demo's model

# The kernel kills all processes of all hosts when this process ends.
NAMESPACES = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork",
              "--kill-child", "--mount-proc"]
if os.geteuid() != 0:
    NAMESPACES += ["--user", "--map-root-user"]

# Each rank writes the name of its host to a file with its rank's name.
TELL_HOST = 'hostname >"$0/$OMPI_COMM_WORLD_RANK"; exec "$@"'

# host1 stays after mpiexec until standard input ends, so that a test can see which ranks are left.
STAY = '"$@" </dev/null; echo $? >"$0"; read -r line'

# The daemons of Open MPI notice within seconds that another host is silent, instead of eight minutes.
IMPATIENT = ["--mca", "oob_tcp_keepalive_time", "2", "--mca", "oob_tcp_keepalive_intvl", "1", "--mca",
             "oob_tcp_keepalive_probes", "2"]


def missing():
    """Returns what these tests lack, or None."""
    if not MPIEXEC:
        return "needs MPI"
    version = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True).stdout
    if not re.search(r"(Open MPI|OpenRTE)\) 4\.", version):
        return "needs the launcher of Open MPI 4"
    for tool in ("ip", "unshare", "nsenter", "setpriv", "bash"):
        if not shutil.which(tool):
            return f"needs {tool} (Debian: iproute2, util-linux)"
    make_network = "ip link add eth0 type bridge && ip link add host2 type veth && mount -t tmpfs tmpfs /dev/shm && hostname host1"
    done = subprocess.run([*NAMESPACES, "sh", "-c", make_network], capture_output=True, text=True)
    if done.returncode != 0:
        return f"may not make namespaces, networks and mounts: {(done.stderr.splitlines() or ['no message'])[-1]}"
    return None


def mappings_shared(pid):
    """Returns the shared writable mappings of a process, as pairs of device and file."""
    lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    fields = [line.split(None, 5) for line in lines]
    return {(device, inode) for _, mode, _, device, inode, *_ in fields if mode == "rw-s"}


class HostsCase(TestCase):
    @classmethod
    def setUpClass(cls):
        reason = missing()
        if reason:
            raise unittest.SkipTest(reason)

    def setUp(self):
        super().setUp()
        self.places = self.folder / "places"

    def on_hosts(self, hosts, ranks, *command, flags=(), before=()):
        """The command line that starts `command` on ranks that are dealt to hosts in turn.

        flags: of mpiexec. before: in front of mpiexec.
        """
        folder = self.folder / "hosts"
        for path in (folder, self.places):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        names = [f"host{i + 1}" for i in range(hosts)]
        slots = -(-ranks // hosts)
        (self.folder / "hostfile").write_text("".join(f"{name} slots={slots}\n" for name in names))
        shared = map(str, (SOURCE, SCRIPT.parent, pathlib.Path(KVZAP).parent, pathlib.Path(GOLDEN).parent, self.folder))
        return [*NAMESPACES, SCRIPT, "run", str(hosts), folder, ":".join(shared), *before, MPIEXEC, *FLAGS, *flags, "--hostfile",
                self.folder / "hostfile", "--map-by", "node", "-n", str(ranks), "sh", "-c", TELL_HOST, self.places, *command]

    def check_places(self, hosts, ranks):
        places = [(self.places / str(rank)).read_text().strip() for rank in range(ranks)]
        self.assertEqual(places, [f"host{rank % hosts + 1}" for rank in range(ranks)])

    def run_on_hosts(self, hosts, ranks, *command, **options):
        result = run_command(self.on_hosts(hosts, ranks, *command), **options)
        self.assertEqual(result.code, 0, result)
        self.assertEqual(result.errors, [], result)
        self.check_places(hosts, ranks)
        return result


class Runs(HostsCase):
    DEMO = ("--config", SOURCE / "inputs/demo.toml", "-t", "1", "--page-rows", "16", "--dtype", "f32")

    def report(self):
        return json.loads((self.folder / "report.json").read_text())

    def demo(self, *arguments):
        return [KVZAP, "run", *self.DEMO, "--json", self.folder / "report.json", *arguments]

    def test_answers(self):
        """Those of one rank, also with more ranks than KV heads."""
        expected = run_command(self.demo(), cwd=SOURCE)
        self.assertEqual(expected.code, 0, expected)
        alone = self.report()
        for hosts, ranks in ((2, 2), (3, HEADS + 2)):
            result = self.run_on_hosts(hosts, ranks, *self.demo(), cwd=SOURCE)
            self.assertEqual(result.text, expected.text)
            report = self.report()
            self.assertEqual(report["ranks"], ranks)
            self.assertEqual(report["context"]["kept_rows"], alone["context"]["kept_rows"])
            self.assertGreater(report["context"]["kv"]["moved_pages"], 0)

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_snapshots(self):
        """One file of ranks on two hosts, in a folder that both see."""
        file = self.folder / "snapshot.h5"
        expected = self.run_on_hosts(2, 2, *self.demo("--snapshot", file), cwd=SOURCE)
        resume = [KVZAP, "run", "--resume", file, "--question", "\n\nWhat is the special magic number for delta?", "-n", "32"]
        for result in (run_command(resume, cwd=SOURCE), self.run_on_hosts(3, 3, *resume, cwd=SOURCE)):
            self.assertEqual(result.code, 0, result)
            self.assertEqual(result.text, expected.text)


class Goldens(HostsCase):
    def check(self, hosts, ranks, names):
        if not os.path.exists(GOLDEN):
            self.skipTest(f"needs {GOLDEN}")
        result = self.run_on_hosts(hosts, ranks, GOLDEN, "--gtest_color=no", f"--gtest_filter={names}")
        self.assertRegex(result.text, r"\[  PASSED  \] [1-9]\d* tests?\.")

    def test_families_on_three_hosts(self):
        self.check(3, 3, "*FamilyGoldens.FullCache*:*FamilyGoldens.PrunedRuns*")


class LongGoldens(Goldens):
    """Many sums over ranks. Ranks on several hosts spin while they wait, so a busy machine makes these slow."""

    test_families_on_three_hosts = None

    def test_on_two_hosts(self):
        self.check(2, 2, "*Golden.EveryRun*random*:*PolicyGoldens*qwen2*")

    def test_on_three_hosts(self):
        self.check(3, 3, "*Golden.EveryRun*recall*:*FamilyGoldens.Policies*")


class FailingHostsCase(HostsCase):
    """All ranks of all hosts end, with one message that names the host."""

    def start(self, hosts, ranks, flags=()):
        """Starts a run of many tokens. Returns the process and for each host the ids of its ranks."""
        run = [KVZAP, "run", "-m", MODEL, "--token-ids", "-p", "1 2 3", "-n", "1000000", "--ignore-eos", "--random-weights", "1"]
        self.status = self.folder / "status"
        command = self.on_hosts(hosts, ranks, *run, flags=flags, before=["sh", "-c", STAY, self.status])
        out, self.errors = self.folder / "out", self.folder / "errors"
        with open(out, "wb") as out_file, open(self.errors, "wb") as errors_file:
            job = subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE, stdout=out_file, stderr=errors_file)
        self.addCleanup(job.communicate)
        self.addCleanup(job.kill)
        self.wait(lambda: out.stat().st_size > 20 or self.has_ended(job), self.errors.read_text)
        self.assertFalse(self.has_ended(job), self.errors.read_text())
        self.check_places(hosts, ranks)
        pids = {}
        for pid in descendants(job.pid):
            command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if command[0] != os.fsencode(KVZAP):
                continue
            variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = next(int(line.split(b"=")[1]) for line in variables if line.startswith(b"OMPI_COMM_WORLD_RANK="))
            pids.setdefault((self.places / str(rank)).read_text().strip(), {})[rank] = pid
        self.assertEqual(sum(map(len, pids.values())), ranks)
        return job, pids

    def has_ended(self, job):
        """Whether mpiexec has; its host stays."""
        return job.poll() is not None or (self.status.exists() and self.status.read_text() != "")

    def wait(self, condition, message):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            self.assertLess(time.monotonic(), deadline, message())
            time.sleep(0.05)

    def host_process(self, job, host):
        """The process that a host lives as long as."""
        number = (self.folder / "hosts" / host).read_text().strip()  # as host1 counts
        for pid in descendants(job.pid):
            status = pathlib.Path(f"/proc/{pid}/status").read_text()
            if re.search(r"^NSpid:\s*(.*)$", status, re.M)[1].split()[1:2] == [number]:
                return pid
        return self.fail(f"{host} has no process")

    def cut_off(self, job, host):
        """Takes down the network of a host, which says nothing more to the others."""
        enter = ["nsenter", "--target", descendants(job.pid)[0], "--net"]
        if os.geteuid() != 0:
            enter += ["--user", "--preserve-credentials"]
        result = run_command([*enter, "ip", "link", "set", host, "down"])
        self.assertEqual(result.code, 0, result)

    def end(self, job, pids, message):
        """Waits until mpiexec and all ranks have ended."""
        ranks = [pid for of_host in pids.values() for pid in of_host.values()]
        self.wait(lambda: self.has_ended(job), lambda: "mpiexec is still there")
        self.wait(lambda: not any(map(running, ranks)), lambda: f"still there: {list(filter(running, ranks))}")
        self.assertNotEqual(int(self.status.read_text()), 0)
        job.communicate()
        text = self.errors.read_text()
        self.assertEqual(len(re.findall(message, text)), 1, text)
        self.assertNotIn("kvzap:", text)


class Failures(FailingHostsCase):
    def test_hosts_share_no_memory(self):
        job, pids = self.start(2, 4)
        shared = {host: [mappings_shared(pid) for pid in ranks.values()] for host, ranks in pids.items()}
        self.assertEqual(sorted(shared), ["host1", "host2"])
        for one, other in shared.values():
            self.assertTrue(one & other)  # ranks of a host do
        for first in shared["host1"]:
            for second in shared["host2"]:
                self.assertEqual(first & second, set())

    def test_a_rank_is_killed(self):
        job, pids = self.start(3, 3)
        os.kill(pids["host2"][1], signal.SIGKILL)
        self.end(job, pids, r"process rank 1 with PID \d+ on node host2 exited on signal 9 \(Killed\)")


class LostHosts(FailingHostsCase):
    def test_a_host_ends(self):
        """With its daemon, as at a shutdown: the system closes its connections.

        mpiexec may see first that the remote shell has failed. Its message then names no host.
        """
        job, pids = self.start(3, 3)
        os.kill(self.host_process(job, "host3"), signal.SIGKILL)
        self.end(job, pids, r"lost communication with a remote daemon(?:.|\n)*on node host3|"
                            r"unable to reliably start one or more daemons")

    def test_a_host_is_cut_off(self):
        """Its own ranks end as well."""
        job, pids = self.start(2, 2, IMPATIENT)
        self.cut_off(job, "host2")
        self.end(job, pids, r"lost communication with a remote daemon(?:.|\n)*on node host2")


if __name__ == "__main__":
    unittest.main()

"""Files of a release: one version everywhere, a valid list of components, workflows that call existing scripts."""

import importlib.machinery
import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOADER = importlib.machinery.SourceFileLoader("release", str(ROOT / "scripts/release"))
release = importlib.util.module_from_spec(importlib.util.spec_from_loader("release", LOADER))
LOADER.exec_module(release)


class Release(unittest.TestCase):
    def test_all_files_name_one_version(self):
        self.assertEqual(set(release.versions().values()), {release.project_version()}, release.versions())

    def test_the_package_of_python_takes_the_version_of_the_project(self):
        text = (ROOT / "pyproject.toml").read_text()
        self.assertNotRegex(text, r'(?m)^version = ')
        pattern = re.search(r"regex = '(.*)'", text)[1]
        self.assertEqual(re.search(pattern, (ROOT / "CMakeLists.txt").read_text())["value"], release.project_version())

    def test_packages_of_the_wheel_are_in_the_list_of_packages(self):
        text = (ROOT / "scripts/setup.sh").read_text()
        lists = {name: set(re.search(rf"^{name}=\((.*?)\)$", text, re.MULTILINE | re.DOTALL)[1].split())
                 for name in ("kvzap_packages", "kvzap_wheel_packages", "kvzap_arm_packages", "kvzap_arm_libraries")}
        more = lists["kvzap_wheel_packages"] - lists["kvzap_packages"]
        self.assertEqual(more, {"file", "python3-dev", "python3-venv", "libopenblas-pthread-dev", "zlib1g-dev"})
        less = lists["kvzap_packages"] - lists["kvzap_wheel_packages"]
        self.assertEqual(less, {"libopenmpi-dev", "openmpi-bin", "libhdf5-openmpi-dev", "libopenblas-dev"})
        # libopenblas-dev and libhdf5-dev bring the last two.
        tools = lists["kvzap_arm_packages"] | {"g++", "file", "python3-venv", "libopenblas-pthread-dev", "zlib1g-dev"}
        self.assertLessEqual(lists["kvzap_wheel_packages"] - tools, lists["kvzap_arm_libraries"])

    @unittest.skipUnless((ROOT / ".git").exists(), "needs the repository")
    def test_components(self):
        with tempfile.TemporaryDirectory() as folder:
            archive = pathlib.Path(folder) / "kvzap.tar.gz"
            archive.write_bytes(b"sources")
            document = release.components("1.2.3", archive)
        identities = [package["SPDXID"] for package in document["packages"]]
        self.assertEqual(len(identities), len(set(identities)))
        for identity in identities:
            self.assertRegex(identity, r"^SPDXRef-[A-Za-z0-9.-]+$")
        related = {relation["relatedSpdxElement"] for relation in document["relationships"]}
        self.assertEqual(related, set(identities))
        names = {package["name"] for package in document["packages"]}
        self.assertLessEqual({"kvzap", "libhdf5-openmpi-dev", "libtrilinos-kokkos-dev", "libdnnl-dev"}, names)
        self.assertNotIn("cmake", names)
        self.assertEqual(document["packages"][0]["checksums"][0]["checksumValue"],
                         release.hashlib.sha256(b"sources").hexdigest())

    @unittest.skipUnless(shutil.which("gpg") and shutil.which("gpg-agent"), "needs gpg and its agent")
    def test_signature(self):
        with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.dict("os.environ", GNUPGHOME=folder):
            gpg = ["gpg", "--quiet", "--batch", "--pinentry-mode", "loopback", "--passphrase", ""]
            for user in ("first", "second"):
                subprocess.run([*gpg, "--quick-generate-key", user, "ed25519"], check=True, capture_output=True)
            sums = pathlib.Path(folder) / "SHA256SUMS"
            sums.write_text("00  file\n")
            release.sign(sums, "second")
            signature = str(release.signature_of(sums))
            verified = subprocess.run(["gpg", "--verify", signature, str(sums)], capture_output=True, text=True, check=True)
            self.assertIn("second", verified.stderr)
            sums.write_text("01  file\n")
            self.assertTrue(subprocess.run(["gpg", "--verify", signature, str(sums)], capture_output=True).returncode)
            subprocess.run(["gpgconf", "--kill", "all"], capture_output=True)

    def test_workflows_call_scripts_of_the_repository(self):
        for path in (ROOT / ".github/workflows").glob("*.yml"):
            called = re.findall(r"\bscripts/[a-z_-]+", path.read_text())
            self.assertTrue(called, path)
            for script in called:
                self.assertTrue((ROOT / script).is_file(), f"{path.name}: {script}")

    def test_workflows_pin_actions(self):
        for path in (ROOT / ".github/workflows").glob("*.yml"):
            for action in re.findall(r"uses: (\S+)", path.read_text()):
                self.assertRegex(action, r"@[0-9a-f]{40}$", path.name)


if __name__ == "__main__":
    unittest.main()

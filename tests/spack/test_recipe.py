"""The Spack recipe against a stand-in for Spack (stand_in.py): every combination of variants, with
several versions of Kokkos and CUDA, gives the dependencies, conflicts and CMake options that are
written down here a second time."""

import contextlib
import itertools
import os
import pathlib
import re
import types
import unittest
import unittest.mock

import stand_in

SOURCE = pathlib.Path(__file__).resolve().parents[2]
REPOSITORY = SOURCE / "spack/spack_repo/kvzap"
RECIPE = REPOSITORY / "packages/kvzap/package.py"


def load():
    stand_in.install()
    module = {"__file__": str(RECIPE), "__name__": "recipe"}
    exec(compile(RECIPE.read_text(), str(RECIPE), "exec"), module)
    return module["Kvzap"]


DEVICES = [
    {},
    {"cuda": True, "cuda_arch": "none"},
    {"cuda": True, "cuda_arch": "90"},
    {"rocm": True, "amdgpu_target": "none"},
    {"rocm": True, "amdgpu_target": "gfx942"},
    {"sycl": True},
    {"cuda": True, "cuda_arch": "90", "rocm": True, "amdgpu_target": "gfx942"},
    {"cuda": True, "cuda_arch": "90", "sycl": True},
    {"rocm": True, "amdgpu_target": "gfx942", "sycl": True},
]


def builds():
    """Every combination, with its dependencies at several versions."""
    flags = ("mpi", "hdf5", "openmp", "onednn", "server", "tests")
    for values in itertools.product((False, True), repeat=len(flags)):
        for device, kokkos, cuda in itertools.product(
            DEVICES, ("4.6.02", "4.7.01", "5.1.1"), ("12.6", "13.0")
        ):
            variants = {"cuda": False, "rocm": False, "sycl": False, **device}
            variants.update(zip(flags, values))
            # A part of the combinations: these do not look at the others.
            variants["line_editor"] = not variants["server"]
            variants["python"] = variants["shared"] = variants["onednn"]
            variants["pic"] = True
            variants["nccl"] = variants["server"]
            variants["plot"] = not variants["python"]
            dependencies = {"openblas": stand_in.Build({"threads": "none"})}
            for name, version in (("kokkos", kokkos), ("cuda", cuda), ("hip", "6.2"), ("python", "3.13")):
                dependencies[name] = stand_in.Build({})
                dependencies[name].version = version
            if not variants["cuda"]:
                del dependencies["cuda"]
            dependencies["kokkos"].kokkos_cxx = "nvcc_wrapper"
            dependencies["hip"].hipcc = "hipcc"
            dependencies["python"].command = types.SimpleNamespace(path="/python")
            yield stand_in.Build(variants, dependencies)


def required(package, build):
    """Name -> set of everything that is asked of it."""
    found = {}
    for kind, (spec,), options in package.directives:
        if kind == "depends_on" and build.satisfies(options.get("when", "")):
            name, *rest = spec.replace("@", " @").split()
            found.setdefault(name, set()).update(rest)
    return found


def conflicts(package, build):
    return [
        options["msg"]
        for kind, args, options in package.directives
        if kind == "conflicts"
        and build.satisfies(args[0])
        and build.satisfies(options.get("when", ""))
    ]


class Recipe(unittest.TestCase):
    def setUp(self):
        self.package = load()

    def test_variants(self):
        variants = {
            args[0]: options for kind, args, options in self.package.directives if kind == "variant"
        }
        self.assertEqual(
            set(variants),
            {"mpi", "hdf5", "openmp", "cuda", "cuda_arch", "rocm", "amdgpu_target", "sycl", "onednn",
             "nccl", "server", "line_editor", "plot", "python", "shared", "pic", "tests"},
        )
        for name in ("cuda", "rocm", "sycl", "nccl", "python", "shared", "tests"):
            self.assertIs(variants[name]["default"], False)

    def test_every_condition_speaks_of_known_variants(self):
        variants = {d[1][0] for d in self.package.directives if d[0] == "variant"}
        for kind, args, options in self.package.directives:
            conditions = [options.get("when", "")] + ([args[0]] if kind == "conflicts" else [])
            for subject, literal, key, _ in itertools.chain(*map(stand_in.parse, conditions)):
                if subject is None and literal == "variant":
                    self.assertIn(key, variants)

    def test_conflicts_have_messages(self):
        for kind, _, options in self.package.directives:
            if kind == "conflicts":
                self.assertTrue(options["msg"])

    def test_dependencies_of_every_combination(self):
        for build in builds():
            on = build.variants
            kokkos_version = build["kokkos"].version
            found = required(self.package, build)
            with self.subTest(variants=on, kokkos=kokkos_version):
                self.assertEqual("mpi" in found, on["mpi"])
                self.assertEqual("hdf5" in found, on["hdf5"])
                if on["hdf5"]:
                    self.assertEqual(found["hdf5"], {"@1.10:", "+mpi" if on["mpi"] else "~mpi"})
                self.assertEqual("onednn" in found, on["onednn"])
                self.assertEqual("nccl" in found, on["nccl"])
                if on["nccl"]:
                    self.assertEqual("cuda_arch=90" in found["nccl"], on.get("cuda_arch") == "90")
                self.assertEqual("boost" in found, on["server"])
                self.assertEqual("libedit" in found, on["line_editor"])
                self.assertEqual("googletest" in found, on["tests"])
                self.assertEqual("python" in found, on["tests"] or on["plot"])
                self.assertEqual("py-matplotlib" in found, on["plot"])
                self.assertEqual("py-h5py" in found, on["plot"] and on["hdf5"])
                self.assertEqual(found.get("openblas"), {"threads=openmp"} if on["openmp"] else None)
                self.assertEqual(found["utf8proc"], {"@2.6:", "+shared"} if on["shared"] else {"@2.6:"})
                self.assertEqual("py-nanobind" in found, on["python"])
                self.assertEqual("py-numpy" in found, on["python"])
                for name in ("nlohmann-json", "fmt", "pcre2", "utf8proc", "cli11", "tomlplusplus",
                             "cmake", "blas", "lapack", "c", "cxx", "pkgconfig"):
                    self.assertIn(name, found)

                kokkos, kernels = found["kokkos"], found["kokkos-kernels"]
                self.assertIn("+blas", kernels)
                for both in (kokkos, kernels):
                    self.assertIn("@3.4.01:", both)
                    self.assertEqual("+openmp" in both, on["openmp"])
                    self.assertEqual("+cuda" in both, on.get("cuda_arch") == "90")
                    self.assertEqual("cuda_arch=90" in both, on.get("cuda_arch") == "90")
                    self.assertNotIn("cuda_arch=80", both)
                self.assertEqual("+serial" in kokkos, not on["openmp"])
                self.assertEqual("+sycl" in kokkos, on["sycl"])
                self.assertEqual("+rocm" in kokkos, on.get("amdgpu_target") == "gfx942")
                self.assertEqual("amdgpu_target=gfx942" in kokkos, "+rocm" in kokkos)
                self.assertEqual("+cublas" in kernels, on["cuda"])
                self.assertEqual("+rocblas" in kernels, on["rocm"])
                self.assertEqual("+wrapper" in kokkos, on["cuda"])
                self.assertEqual(
                    "@4.7.01:" in kokkos, on["cuda"] and build["cuda"].version == "13.0"
                )
                self.assertEqual("@4.5:" in kokkos, on["sycl"])

    def test_conflicts_of_every_combination(self):
        for build in builds():
            on = build.variants
            expected = []
            if on.get("cuda_arch") == "none":
                expected.append("cuda_arch=90")
            if on.get("amdgpu_target") == "none":
                expected.append("amdgpu_target=gfx942")
            for first, second in (("CUDA", "HIP"), ("CUDA", "SYCL"), ("HIP", "SYCL")):
                name = {"CUDA": "cuda", "HIP": "rocm", "SYCL": "sycl"}
                if on[name[first]] and on[name[second]]:
                    expected.append(f"{first} or {second}")
            if on["nccl"] and not on["cuda"]:
                expected.append("needs +cuda")
            if on["nccl"] and not on["mpi"]:
                expected.append("needs +mpi")
            found = conflicts(self.package, build)
            with self.subTest(variants=on):
                self.assertEqual(len(found), len(expected), found)
                for part, message in zip(expected, found):
                    self.assertIn(part, message)

    def test_libraries_and_modules_need_position_independent_code(self):
        none = {"cuda": False, "rocm": False, "sycl": False, "pic": False, "shared": False, "python": False}
        for name, bad in (("shared", 1), ("python", 1), ("pic", 0)):
            self.assertEqual(len(conflicts(self.package, stand_in.Build({**none, name: True}))), bad, name)

    def test_versions(self):
        versions = {args[0]: options for kind, args, options in self.package.directives if kind == "version"}
        self.assertEqual(versions.pop("main"), {"branch": "main"})
        for version, options in versions.items():
            self.assertEqual(set(options), {"tag", "commit"}, "a release is a tag; its commit is the checksum")
            self.assertEqual(options["tag"], f"v{version}")
            self.assertRegex(options["commit"], r"^[0-9a-f]{40}$")

    def test_lambdas_are_an_option_of_kokkos_up_to_version_4(self):
        on = {"cuda": True, "cuda_arch": "90", "rocm": False, "sycl": False, "pic": True}
        for version, options, bad in (("4.7.01", {"cuda_lambda": False}, 1), ("4.7.01", {"cuda_lambda": True}, 0),
                                      ("5.1.1", {}, 0)):
            kokkos = stand_in.Build(options)
            kokkos.version = version
            self.assertEqual(len(conflicts(self.package, stand_in.Build(on, {"kokkos": kokkos}))), bad, version)

    def test_old_compilers_conflict(self):
        variants = {"cuda": False, "rocm": False, "sycl": False, "pic": True}
        for compiler, bad in ((("gcc", "8.5"), 1), (("gcc", "9.4"), 0), (("clang", "9.0"), 1),
                              (("clang", "14.0.6"), 0)):
            build = stand_in.Build(variants, compiler=compiler)
            self.assertEqual(len(conflicts(self.package, build)), bad, compiler)

    def test_cmake_options_of_every_combination(self):
        names = set()
        for build in builds():
            on = build.variants
            given = self.package(build).cmake_args()
            with self.subTest(variants=on, kokkos=build["kokkos"].version):
                for name in ("MPI", "HDF5", "OPENMP", "ONEDNN", "NCCL", "SERVER", "LINE_EDITOR", "PYTHON", "TESTS"):
                    value = "ON" if on[name.lower()] else "OFF"
                    self.assertIn(f"-DKVZAP_ENABLE_{name}:BOOL={value}", given)
                for name, variant in (("BUILD_SHARED_LIBS", "shared"), ("CMAKE_POSITION_INDEPENDENT_CODE", "pic")):
                    self.assertIn(f"-D{name}:BOOL={'ON' if on[variant] else 'OFF'}", given)
                self.assertEqual("-DPython_EXECUTABLE:STRING=/python" in given, on["python"])
                self.assertIn("-DKVZAP_ENABLE_DRIVERS:BOOL=ON", given)
                self.assertIn("-DKVZAP_ENABLE_PERF:BOOL=OFF", given)
                self.assertIn("-DKVZAP_UNITE_SOURCES:BOOL=ON", given)
                standard = "20" if build["kokkos"].version.startswith("5") else "17"
                self.assertIn(f"-DCMAKE_CXX_STANDARD:STRING={standard}", given)
                compilers = [arg for arg in given if "COMPILER" in arg]
                self.assertEqual(len(compilers), 1 if on["cuda"] or on["rocm"] else 0)
                names |= {re.match(r"-D(\w+)", arg)[1] for arg in given}
        options = re.findall(r'^(?:option\((KVZAP_\w+)|set\((KVZAP_\w+) "" CACHE)',
                             (SOURCE / "CMakeLists.txt").read_text(), re.MULTILINE)
        self.assertLessEqual({name for name in names if name.startswith("KVZAP")}, set(sum(options, ())))

    def test_every_variant_reaches_cmake(self):
        device = {"cuda": {"cuda_arch": "90"}, "rocm": {"amdgpu_target": "gfx942"}}
        variants = {d[1][0]: d[2]["default"] for d in self.package.directives if d[0] == "variant"}
        del variants["plot"]  # nothing that is built
        own = {name: default for name, default in variants.items() if isinstance(default, bool)}
        dependencies = {name: stand_in.Build({}) for name in ("kokkos", "hip", "python")}
        dependencies["kokkos"].version, dependencies["kokkos"].kokkos_cxx = "4.7.01", "nvcc_wrapper"
        dependencies["hip"].hipcc = "hipcc"
        dependencies["python"].command = types.SimpleNamespace(path="/python")

        def given(**changed):
            return self.package(stand_in.Build({**own, **changed}, dependencies)).cmake_args()

        for name, default in own.items():
            with self.subTest(variant=name):
                self.assertNotEqual(given(), given(**{name: not default}, **device.get(name, {})))
        for flags, backend in (({}, "OpenMP"), ({"openmp": False}, "Serial"), ({"sycl": True}, "SYCL"),
                               ({"cuda": True}, "Cuda"), ({"rocm": True}, "HIP")):
            self.assertIn(f"-DKVZAP_REQUIRE_BACKEND:STRING={backend}", given(**flags))

    def test_installed_examples_build_by_the_generator_of_the_build(self):
        for generator, name, program in (("make", "gmake", "make"), ("ninja", "ninja", "ninja")):
            calls = []
            given = {"join_path": os.path.join, "working_dir": lambda *_, **__: contextlib.nullcontext(),
                     "get_cmake_prefix_path": lambda package: "/of/kokkos",
                     "which": lambda path, **_: lambda *arguments: calls.append((path, arguments))}
            dependencies = {key: stand_in.Build({}) for key in ("cmake", "pkgconfig", name)}
            for key, dependency in dependencies.items():
                dependency.prefix = stand_in.Prefix(f"/of/{key}")
            build = stand_in.Build({"generator": generator, "rocm": False, "cuda": False}, dependencies)
            with self.subTest(generator=generator), unittest.mock.patch.dict(self.package.test_examples.__globals__, given):
                self.package(build).test_examples()
            (cmake, configure), *_ = calls
            self.assertEqual(cmake, "/of/cmake/bin/cmake")
            self.assertEqual(configure[2].endswith("Makefiles"), generator == "make")
            self.assertIn("-DCMAKE_PREFIX_PATH:STRING=/of/kokkos", configure)
            self.assertIn(f"-DCMAKE_MAKE_PROGRAM:STRING=/of/{name}/bin/{program}", configure)
            self.assertEqual([os.path.basename(path) for path, _ in calls[2:]], ["prune_own_cache", "ragged_attention"])

    def test_environments_ask_for_what_they_need(self):
        # Spack leaves MPI or plots out of a plain "kvzap" without a word if it cannot have them.
        for folder in ("", "debian"):
            root = re.search(r"^  - (kvzap.*?)(?:  #|$)", (SOURCE / "spack" / folder / "spack.yaml").read_text(), re.MULTILINE)[1]
            self.assertIn("+mpi +hdf5 +plot", root)

    def test_externals_of_debian_are_new_enough(self):
        text = (SOURCE / "spack/debian/spack.yaml").read_text()
        externals = dict(re.findall(r"spec: ([\w-]+)@([\d.]+)", text))
        compared = set()
        for kind, (spec, *_), _ in self.package.directives:
            name, _, versions = spec.partition(" ")[0].partition("@")
            if kind == "depends_on" and versions and name in externals:
                compared.add(name)
                self.assertTrue(stand_in.in_versions(externals[name], versions), spec)
        self.assertLessEqual({"boost", "cmake", "fmt", "hdf5", "onednn", "python"}, compared)

    def test_repository(self):
        self.assertIn("namespace: kvzap", (REPOSITORY / "repo.yaml").read_text())
        self.assertIn("api: v2.0", (REPOSITORY / "repo.yaml").read_text())
        self.assertEqual(self.package.git, f"file://{SOURCE}")
        self.assertTrue(os.access(RECIPE, os.R_OK))


if __name__ == "__main__":
    unittest.main()

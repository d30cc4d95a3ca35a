# Spack recipe of kvzap, by package API v2. The folder spack/spack_repo/kvzap is a package repository:
#
#   spack repo add path/to/kvzap/spack/spack_repo/kvzap
#   spack install kvzap +cuda cuda_arch=90
import os

from spack_repo.builtin.build_systems.cmake import CMakePackage
from spack_repo.builtin.build_systems.cuda import CudaPackage
from spack_repo.builtin.build_systems.rocm import ROCmPackage

from spack.package import *


class Kvzap(CMakePackage, CudaPackage, ROCmPackage):
    """Prunes the KV cache of a transformer while it runs and really frees the memory: a C++17
    library and a program on Kokkos, MPI and HDF5."""

    # The clone of kvzap that this recipe is part of. The project has no public address yet.
    git = "file://" + os.path.realpath(os.path.join(os.path.dirname(__file__), *5 * [".."]))
    homepage = git

    # As in debian/control: names no account of another person.
    maintainers("maintainers@kvzap.invalid")
    license("Apache-2.0")
    test_requires_compiler = True

    version("main", branch="main")
    # A release is its tag with the tag's commit as checksum. scripts/release prints its line.

    variant("mpi", default=True, description="Share a model's heads among MPI ranks")
    variant("hdf5", default=True, description="Snapshots of the cache, files of training pairs")
    variant("openmp", default=True, description="Run the loops of hosts, and Kokkos, on OpenMP's threads")
    variant("sycl", default=False, description="Run on Intel GPUs through SYCL")
    variant("onednn", default=True, description="oneDNN for dense products on the host")
    variant("nccl", default=False, description="NCCL between ranks on NVIDIA's GPUs")
    variant("server", default=True, description="kvzap serve")
    variant("line_editor", default=True, description="Line editor of kvzap chat")
    variant("plot", default=True, description="Python packages that kvzap-plot runs on")
    variant("python", default=False, description="The Python package")
    variant("shared", default=False, description="Shared libraries")
    variant("pic", default=True, description="Position-independent code in static libraries")
    variant("tests", default=False, description="Build the project's own tests")
    # cuda, cuda_arch, rocm and amdgpu_target come with CudaPackage and ROCmPackage.

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.18:", type="build")
    # Kokkos 5 itself asks for it.
    depends_on("cmake@3.22:", type="build", when="^kokkos@5:")
    depends_on("pkgconfig", type="build")

    # Kokkos 3.4 is the oldest that the source builds with. What Kokkos demands of compilers and of
    # CUDA, its own recipe says; the floors here are those that kvzap adds.
    depends_on("kokkos@3.4.01:")
    depends_on("kokkos@3.7.02:", when="+cuda")  # scans of types under 4 bytes are wrong before
    depends_on("kokkos@4.7.01:", when="+cuda ^cuda@13:")
    depends_on("kokkos@4.2:", when="+rocm")
    depends_on("kokkos@4.5:", when="+sycl")
    # Products of floats reach BLAS through Kokkos Kernels; without it they are slow.
    depends_on("kokkos-kernels@3.4.01: +blas scalars=float,double")
    depends_on("kokkos-kernels +cublas", when="+cuda")
    depends_on("kokkos-kernels +rocblas", when="+rocm")
    depends_on("blas")
    depends_on("lapack")
    depends_on("openblas threads=openmp", when="+openmp ^[virtuals=blas] openblas")

    # The same backends in both.
    depends_on("kokkos +openmp", when="+openmp")
    depends_on("kokkos-kernels +openmp", when="+openmp")
    depends_on("kokkos +serial", when="~openmp")
    depends_on("kokkos +sycl", when="+sycl")
    # Lambdas in kernels are an option up to Kokkos 4, and nvcc compiles C++ through a wrapper.
    conflicts("^kokkos@:4 ~cuda_lambda", when="+cuda", msg="kernels are lambdas: Kokkos +cuda_lambda")
    depends_on("kokkos +wrapper", when="+cuda %gcc")
    for _arch in CudaPackage.cuda_arch_values:
        for _package in ("kokkos", "kokkos-kernels"):
            depends_on(f"{_package} +cuda cuda_arch={_arch}", when=f"+cuda cuda_arch={_arch}")
        depends_on(f"nccl cuda_arch={_arch}", when=f"+nccl cuda_arch={_arch}")
    for _target in ROCmPackage.amdgpu_targets:
        # Kokkos Kernels takes its target from Kokkos.
        depends_on(f"kokkos +rocm amdgpu_target={_target}", when=f"+rocm amdgpu_target={_target}")

    depends_on("mpi", when="+mpi")
    depends_on("hdf5@1.10: +mpi", when="+hdf5 +mpi")
    depends_on("hdf5@1.10: ~mpi", when="+hdf5 ~mpi")
    depends_on("zlib-api", when="+hdf5")
    depends_on("onednn@2.6:", when="+onednn")
    depends_on("nccl@2.13.4:", when="+nccl")

    depends_on("nlohmann-json@3.9:")
    depends_on("fmt@8:")
    depends_on("pcre2@10.36:")
    depends_on("utf8proc@2.6:")
    # Its static library is not position-independent.
    depends_on("utf8proc +shared", when="+shared")
    depends_on("utf8proc +shared", when="+python")
    depends_on("cli11@2.1:")
    depends_on("tomlplusplus@3.1:")
    depends_on("boost@1.74:", when="+server")
    depends_on("libedit@3.1:", when="+line_editor")
    depends_on("googletest@1.12:", type="build", when="+tests")
    depends_on("python@3.9:", type=("build", "run"), when="+tests")
    depends_on("python@3.9:", type="run", when="+plot")
    depends_on("py-matplotlib", type="run", when="+plot")
    depends_on("py-h5py", type="run", when="+plot +hdf5")  # plots of snapshots
    extends("python@3.10:", when="+python")
    depends_on("py-nanobind@2.2:", type="build", when="+python")
    depends_on("py-numpy", type=("build", "run"), when="+python")

    conflicts("cuda_arch=none", when="+cuda", msg="+cuda needs a device, such as cuda_arch=90")
    conflicts(
        "amdgpu_target=none", when="+rocm", msg="+rocm needs a device, such as amdgpu_target=gfx942"
    )
    conflicts("+rocm", when="+cuda", msg="Kokkos has one device backend at a time: CUDA or HIP")
    conflicts("+sycl", when="+cuda", msg="Kokkos has one device backend at a time: CUDA or SYCL")
    conflicts("+sycl", when="+rocm", msg="Kokkos has one device backend at a time: HIP or SYCL")
    conflicts("~cuda", when="+nccl", msg="NCCL is of CUDA's devices: +nccl needs +cuda")
    conflicts("~mpi", when="+nccl", msg="ranks are MPI's: +nccl needs +mpi")
    conflicts("~pic", when="+shared", msg="shared libraries need position-independent code")
    conflicts("~pic", when="+python", msg="the Python module needs position-independent code")
    conflicts("%gcc@:8", msg="std::filesystem and C++17 need GCC 9 or newer")
    conflicts("%clang@:9", msg="std::filesystem and C++17 need Clang 10 or newer")

    def cmake_args(self):
        spec = self.spec
        args = [
            self.define_from_variant("KVZAP_ENABLE_MPI", "mpi"),
            self.define_from_variant("KVZAP_ENABLE_HDF5", "hdf5"),
            self.define_from_variant("KVZAP_ENABLE_OPENMP", "openmp"),
            self.define_from_variant("KVZAP_ENABLE_ONEDNN", "onednn"),
            self.define_from_variant("KVZAP_ENABLE_NCCL", "nccl"),
            self.define_from_variant("KVZAP_ENABLE_SERVER", "server"),
            self.define_from_variant("KVZAP_ENABLE_LINE_EDITOR", "line_editor"),
            self.define_from_variant("KVZAP_ENABLE_TESTS", "tests"),
            self.define_from_variant("KVZAP_ENABLE_PYTHON", "python"),
            self.define_from_variant("BUILD_SHARED_LIBS", "shared"),
            self.define_from_variant("CMAKE_POSITION_INDEPENDENT_CODE", "pic"),
            self.define("KVZAP_ENABLE_DRIVERS", True),
            self.define("KVZAP_ENABLE_PERF", False),
            self.define("KVZAP_UNITE_SOURCES", True),  # for builds from nothing
            self.define("KVZAP_REQUIRE_BACKEND", self.backend()),
        ]
        if spec.satisfies("+python"):
            args.append(self.define("Python_EXECUTABLE", spec["python"].command.path))
        args += self.compiler_args()
        # Kokkos 5 is C++20; the source is C++17 and compiles as both.
        standard = "20" if spec["kokkos"].satisfies("@5:") else "17"
        args.append(self.define("CMAKE_CXX_STANDARD", standard))
        return args

    def backend(self):
        """the Kokkos backend without which the build must fail"""
        backends = {"+cuda": "Cuda", "+rocm": "HIP", "+sycl": "SYCL", "+openmp": "OpenMP"}
        return next((name for flag, name in backends.items() if self.spec.satisfies(flag)), "Serial")

    def check(self):
        """`spack install --test=root` runs the project's fast tests, if they were built."""
        if self.spec.satisfies("+tests"):
            with working_dir(self.build_directory):
                ctest("--output-on-failure", "-L", "^fast$")

    def test_version(self):
        """the program starts and names what it was built with"""
        kvzap = which(self.prefix.bin.kvzap, required=True)
        output = kvzap("--version", output=str.split, error=str.split)
        assert "kvzap" in output, output

    def test_demo(self):
        """the demo model answers the demo's question from a pruned cache"""
        kvzap = which(self.prefix.bin.kvzap, required=True)
        with working_dir(join_path(self.prefix.share, "kvzap")):
            output = kvzap("run", "--config", "inputs/demo.toml", output=str.split, error=str.split)
        assert "0507" in output, output

    def test_plot(self):
        """kvzap-plot starts"""
        if not self.spec.satisfies("+plot"):
            raise SkipTest("needs +plot")
        output = which(self.prefix.bin.join("kvzap-plot"))("--help", output=str.split, error=str.split)
        assert "usage" in output, output

    def test_examples(self):
        """installed examples build against the installed package and run"""
        source = join_path(self.prefix.share, "kvzap", "examples")
        # Programs of the build are not in the path of a test.
        cmake = which(self.spec["cmake"].prefix.bin.cmake, required=True)
        if self.spec.satisfies("generator=ninja"):
            generator, make = "Ninja", self.spec["ninja"].prefix.bin.ninja
        else:
            generator, make = "Unix Makefiles", self.spec["gmake"].prefix.bin.make
        programs = {"PKG_CONFIG_EXECUTABLE": self.spec["pkgconfig"].prefix.bin.join("pkg-config"),
                    "CMAKE_MAKE_PROGRAM": make}
        with working_dir("build-examples", create=True):
            cmake(
                source,
                "-G",
                generator,
                self.define("kvzap_ROOT", self.prefix),
                # As in the build: not /usr, where another Kokkos may be.
                self.define("CMAKE_PREFIX_PATH", get_cmake_prefix_path(self)),
                *(self.define(name, path) for name, path in programs.items()),
                *self.compiler_args(),
            )
            # Of the others one wants several ranks and one a model.
            examples = ["prune_own_cache", "ragged_attention"]
            cmake("--build", ".", "--target", *examples)
            for example in examples:
                which(join_path(os.getcwd(), example))()

    def compiler_args(self):
        """the compiler that Kokkos' backend asks for, if it is not Spack's own"""
        if self.spec.satisfies("+rocm"):
            return [self.define("CMAKE_CXX_COMPILER", self.spec["hip"].hipcc)]
        if self.spec.satisfies("+cuda"):
            return [self.define("CMAKE_CXX_COMPILER", self["kokkos"].kokkos_cxx)]
        return []

"""As much of Spack's package language as the recipe uses: directives are written down, and
conditions such as "+cuda cuda_arch=90 ^kokkos@:4" are judged against a given build. Not Spack's
solver: what a dependency is built with is given, not searched for."""

import re
import sys
import types

LITERAL = re.compile(
    r"\s*(?:(?P<sigil>[\^%]?)(?:\[virtuals=\w+\] )?(?P<package>[a-z][\w-]*)(?![\w-]*=)|@(?P<versions>[\w.:,-]+)"
    r"|(?P<sign>[+~])(?P<flag>\w+)|(?P<name>\w+)=(?P<value>[\w.,:-]+))"
)


def parse(text):
    """Literals of a spec: a list of (package or None for the spec itself, kind, key, value)."""
    literals, position, subject = [], 0, None
    text = text.strip()
    while position < len(text):
        match = LITERAL.match(text, position)
        if not match:
            raise ValueError(f"not a spec: {text!r} at {text[position:]!r}")
        position = match.end()
        if match["package"]:
            if not match["sigil"] and literals:
                raise ValueError(f"a second package in {text!r}")
            subject = match["sigil"] + match["package"]
            literals.append((subject, "is", None, None))
        elif match["versions"]:
            literals.append((subject, "version", None, match["versions"]))
        elif match["flag"]:
            literals.append((subject, "variant", match["flag"], match["sign"] == "+"))
        else:
            literals.append((subject, "variant", match["name"], match["value"]))
        if match["package"] and match["sigil"] == "":
            subject = None  # "kokkos +cuda": what follows speaks of kokkos
    return literals


def in_versions(version, ranges):
    """Whether a version such as "4.7.01" is in "4.5:", ":4" (4.9 too), "4:5" or "4.7"."""

    def numbers(text):
        return [int(part) for part in text.split(".")]

    def within(one):
        low, colon, high = one.partition(":")
        have = numbers(version)
        if not colon:
            high = low
        if low and have < numbers(low):
            return False
        return not high or have[: len(numbers(high))] <= numbers(high)

    return any(within(one) for one in ranges.split(","))


class Prefix(str):
    """A folder whose attributes are what is in it: prefix.bin.cmake."""

    def __getattr__(self, name):
        return self.join(name)

    def join(self, name):
        return Prefix(f"{self}/{name}")


class Build:
    """A concrete package: variants of its own, versions and variants of what it depends on."""

    def __init__(self, variants, dependencies=None, compiler=("gcc", "12.2")):
        self.variants = dict(variants)
        self.dependencies = dependencies or {}
        self.compiler = compiler
        self.version = None
        self.prefix = Prefix("/prefix")

    def satisfies(self, text):
        for subject, kind, key, value in parse(text):
            owner = self
            if subject and subject[0] == "%":
                if self.compiler[0] != subject[1:]:
                    return False
                if kind == "version" and not in_versions(self.compiler[1], value):
                    return False
                continue
            if subject and subject[0] == "^":
                owner = self.dependencies.get(subject[1:])
                if owner is None:
                    return False
            if kind == "version" and not (owner.version and in_versions(owner.version, value)):
                return False
            if kind == "variant" and owner.variants.get(key) != value:
                return False
        return True

    def __getitem__(self, name):
        return self.dependencies[name]


class Recorder(type):
    """Metaclass of packages: hands the directives of a class body to the class."""

    pending = []

    def __new__(cls, name, bases, attributes):
        inherited = [d for base in bases for d in getattr(base, "directives", [])]
        attributes["directives"] = inherited + Recorder.pending
        Recorder.pending = []
        return super().__new__(cls, name, bases, attributes)


def directive(kind):
    def record(*args, **kwargs):
        Recorder.pending.append((kind, args, kwargs))

    return record


def install():
    """Puts modules where the recipe looks for them, as package API v2 has them."""
    spack = types.ModuleType("spack")
    package = types.ModuleType("spack.package")
    spack.package = package
    for kind in ("version", "variant", "depends_on", "conflicts", "extends", "license", "maintainers"):
        setattr(package, kind, directive(kind))

    class PackageBase(metaclass=Recorder):
        def __init__(self, spec):
            self.spec = spec
            self.prefix = spec.prefix

        def __getitem__(self, name):
            return self.spec[name]

    class CMakePackage(PackageBase):
        def define(self, name, value):
            if isinstance(value, bool):
                return f"-D{name}:BOOL={'ON' if value else 'OFF'}"
            return f"-D{name}:STRING={value}"

        def define_from_variant(self, name, variant):
            return self.define(name, self.spec.variants[variant])

    directive("variant")("cuda", default=False)
    directive("variant")("cuda_arch", default="none", when="+cuda")

    class CudaPackage(PackageBase):
        cuda_arch_values = ("80", "90", "100")

    directive("variant")("rocm", default=False)
    directive("variant")("amdgpu_target", default="none", when="+rocm")

    class ROCmPackage(PackageBase):
        amdgpu_targets = ("gfx90a", "gfx942")

    modules = {"spack": spack, "spack.package": package}
    systems = {"cmake": CMakePackage, "cuda": CudaPackage, "rocm": ROCmPackage}
    for name in list(sys.modules):
        if name.split(".")[0] in ("spack", "spack_repo"):
            del sys.modules[name]
    path = "spack_repo"
    for part in ("builtin", "build_systems"):
        modules[path] = types.ModuleType(path)
        path += "." + part
    modules[path] = types.ModuleType(path)
    for name, system in systems.items():
        modules[f"{path}.{name}"] = types.ModuleType(name)
        setattr(modules[f"{path}.{name}"], system.__name__, system)
    sys.modules.update(modules)

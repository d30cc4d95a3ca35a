# Which processor or device this is, and what its figures are filed under.
import ctypes
import pathlib
import platform
import re

# (first model, last model) -> microarchitecture, by vendor and family of CPUID. Of several that fit, the last.
MICROARCHITECTURES = {
    ("AuthenticAMD", 23): [(0x00, 0xFF, "Zen 2"), (0x00, 0x2F, "Zen")],
    ("AuthenticAMD", 25): [
        (0x00, 0xFF, "Zen 3"), (0x10, 0x1F, "Zen 4"), (0x60, 0x7F, "Zen 4"), (0xA0, 0xAF, "Zen 4"),
    ],
    ("AuthenticAMD", 26): [(0x00, 0xFF, "Zen 5")],
    ("GenuineIntel", 6): [
        (0x3C, 0x3C, "Haswell"), (0x3F, 0x3F, "Haswell"), (0x45, 0x46, "Haswell"),
        (0x3D, 0x3D, "Broadwell"), (0x47, 0x47, "Broadwell"), (0x4F, 0x4F, "Broadwell"), (0x56, 0x56, "Broadwell"),
        (0x4E, 0x4E, "Skylake"), (0x5E, 0x5E, "Skylake"), (0x55, 0x55, "Skylake-SP"),
        (0x8E, 0x8E, "Kaby Lake"), (0x9E, 0x9E, "Kaby Lake"), (0xA5, 0xA6, "Comet Lake"),
        (0x6A, 0x6A, "Ice Lake-SP"), (0x6C, 0x6C, "Ice Lake-SP"), (0x7D, 0x7E, "Ice Lake"),
        (0x8C, 0x8D, "Tiger Lake"), (0xA7, 0xA7, "Rocket Lake"),
        (0x97, 0x97, "Alder Lake"), (0x9A, 0x9A, "Alder Lake"), (0xBE, 0xBE, "Alder Lake-N"),
        (0xB7, 0xB7, "Raptor Lake"), (0xBA, 0xBA, "Raptor Lake"), (0xBF, 0xBF, "Raptor Lake"),
        (0xAA, 0xAA, "Meteor Lake"), (0xAC, 0xAC, "Meteor Lake"), (0xBD, 0xBD, "Lunar Lake"),
        (0xB5, 0xB5, "Arrow Lake"), (0xC5, 0xC6, "Arrow Lake"), (0xAF, 0xAF, "Sierra Forest"),
        (0x8F, 0x8F, "Sapphire Rapids"), (0xCF, 0xCF, "Emerald Rapids"), (0xAD, 0xAE, "Granite Rapids"),
    ],
}  # fmt: skip
# Intel's processors with tiles. A hypervisor may name another model than the processor that it runs on.
WITH_AMX = ("Sapphire Rapids", "Emerald Rapids", "Granite Rapids")
# Family 6, model 0x55, has three, by stepping.
SKYLAKE_SP = [(0, "Skylake-SP"), (5, "Cascade Lake"), (10, "Cooper Lake")]


def microarchitecture(vendor, family, model, stepping=0):
    """Its name, or None if it is not known."""
    found = None
    for first, last, name in MICROARCHITECTURES.get((vendor, family), []):
        if first <= model <= last:
            found = name
    if found == "Skylake-SP":
        found = [name for first, name in SKYLAKE_SP if stepping >= first][-1]
    return found


def short_name(model_name):
    """A processor's own name without what says nothing about it: "AMD EPYC 9654", "Intel Xeon Platinum 8481C"."""
    text = re.sub(r"\((R|TM|C)\)", " ", model_name, flags=re.IGNORECASE)
    text = re.sub(r"@.*|\b(with|w/) Radeon.*|\b\d+(st|nd|rd|th) Gen\b", " ", text)
    text = re.sub(r"\b(\d+-Core|(Dual|Quad|Six|Eight|Twelve|Sixteen)-Core|Processor|CPU)\b", " ", text)
    return " ".join(text.split())


def slug(text):
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


class Processor:
    """`name`: of folders; `title`: for people; `identity`: vendor, family and model, or what there is of them."""

    def __init__(self, title, identity, flags=()):
        self.title, self.identity, self.flags = title, identity, sorted(flags)
        self.name = slug(title)

    def json(self):
        return {"title": self.title, "identity": self.identity, "float16": self.float16()}

    def float16(self):
        """Instructions for arithmetic of f16 that it has."""
        return [flag for flag in ("amx_fp16", "avx512_fp16") if flag in self.flags]


def of_cpuinfo(text):
    """The processor that a text like that of /proc/cpuinfo describes."""
    fields = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    if "vendor_id" not in fields:  # not x86
        identity = " ".join(fields[key] for key in ("CPU implementer", "CPU part") if key in fields)
        title = short_name(fields.get("model name", "")) or " ".join([platform.machine(), identity])
        return Processor(title.strip(), identity or title, flags)
    vendor = fields["vendor_id"]
    family, model, stepping = (int(fields.get(key) or 0) if fields.get(key, "0").isdigit() else 0
                               for key in ("cpu family", "model", "stepping"))
    title = short_name(fields.get("model name", "")) or vendor
    known = microarchitecture(vendor, family, model, stepping)
    if "amx_tile" in flags and known not in WITH_AMX:
        known = "with AMX"
    if known:
        title += f" ({known})"
    return Processor(title, f"{vendor} family {family} model {model}", flags)


def this_one(cpuinfo=pathlib.Path("/proc/cpuinfo")):
    return of_cpuinfo(cpuinfo.read_text() if cpuinfo.exists() else "")


class Device:
    """A GPU. `architecture`: such as 90, of compute capability 9.0; `memory`: bytes."""

    def __init__(self, title, architecture, memory, driver=""):
        self.title, self.architecture, self.memory, self.driver = title, architecture, memory, driver
        self.name = slug(title)
        self.identity = f"{title}, compute capability {architecture // 10}.{architecture % 10}"

    def json(self):
        return {"title": self.title, "identity": self.identity, "memory_bytes": self.memory, "driver": self.driver}


def this_device():
    """The first device of NVIDIA's driver, or None. The driver's library is on all machines with one; nvidia-smi is not."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, version, major, minor = (ctypes.c_int() for _ in range(4))
    memory = ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    calls = (
        ("cuInit", 0), ("cuDriverGetVersion", ctypes.byref(version)), ("cuDeviceGet", ctypes.byref(device), 0),
    )  # fmt: skip
    if any(getattr(cuda, call)(*arguments) for call, *arguments in calls):
        return None
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # ..._MINOR
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    return Device(name.value.decode(), 10 * major.value + minor.value, memory.value,
                  f"{version.value // 1000}.{version.value % 1000 // 10}")

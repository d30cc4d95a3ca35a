# Shared by the scripts of this folder: installs missing packages and builds into build/.
# Sourced, not run. Needs bash.

# --help prints the comment at a script's head.
case "${1-}" in
-h | --help)
  script=scripts/$(basename "$0")
  [ -f "$script" ] || script=perf/$(basename "$0")
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$script"
  exit
  ;;
esac

kvzap_packages=(
  g++ cmake ninja-build pkg-config
  libtrilinos-kokkos-dev libtrilinos-kokkos-kernels-dev
  libopenmpi-dev openmpi-bin
  libhdf5-openmpi-dev
  libopenblas-dev libdnnl-dev
  libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libfmt-dev libpcre2-dev libutf8proc-dev
  libboost-dev libedit-dev
)
# scripts/wheel: no MPI; HDF5 is built there.
kvzap_wheel_packages=(
  g++ cmake ninja-build pkg-config file python3-dev python3-venv
  libtrilinos-kokkos-dev libtrilinos-kokkos-kernels-dev
  libopenblas-pthread-dev libdnnl-dev zlib1g-dev
  libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libfmt-dev libpcre2-dev libutf8proc-dev
  libboost-dev libedit-dev
)
kvzap_sanitizer_packages=(clang-14 libclang-rt-14-dev)
# scripts/arm and scripts/wheel --arm: a cross compiler and an emulator for the host, and libraries for arm64.
kvzap_arm_packages=(g++-aarch64-linux-gnu qemu-user cmake ninja-build pkg-config)
kvzap_arm_libraries=(
  libtrilinos-kokkos-dev libtrilinos-kokkos-kernels-dev
  libhdf5-dev
  libopenblas-dev libdnnl-dev
  libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libfmt-dev libpcre2-dev libutf8proc-dev
  libboost-dev libedit-dev libgtest-dev python3-dev
)

# kvzap_install PACKAGE...: installs missing packages, or prints the command that does and stops.
kvzap_install() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' ||
      missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" -ne 0 ]; then
    echo "These packages are missing. Install them, then run this again:" >&2
    echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  echo "Installing: ${missing[*]}" >&2
  local log
  log=$(mktemp)
  if ! { apt-get update && DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    cat "$log" >&2
    echo "Installing the packages failed; the output is above." >&2
    exit 1
  fi
  rm -f "$log"
}

# kvzap_build CMAKE_OPTION...: configures and builds into build/; prints the log only on failure. A
# first configuration unites sources, which halves the work of a full build; an existing
# configuration is kept.
kvzap_build() {
  local log
  mkdir -p build
  log=build/build.log
  if [ ! -x build/kvzap ]; then echo "Building into build/ (log: $log) ..." >&2; fi
  if [ ! -f build/CMakeCache.txt ]; then set -- -DKVZAP_UNITE_SOURCES=ON "$@"; fi
  if ! { cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release "$@" && cmake --build build; } \
    >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    echo "The build failed; its whole log is $log." >&2
    exit 1
  fi
}

# kvzap_mpirun RANKS COMMAND...: small machines have fewer cores than ranks, and containers run as
# root.
kvzap_mpirun() {
  local ranks=$1
  shift
  mpirun --oversubscribe --bind-to none --allow-run-as-root -n "$ranks" "$@"
}

# Shared by scripts/arm and scripts/wheel: Debian's arm64 packages, unpacked for the cross compiler and the emulator.
# Sourced after scripts/setup.sh, in the folder of the repository. Needs bash.

sysroot=$PWD/build-arm/sysroot

# The host's libraries and those for arm64 cannot be installed side by side: their -dev packages
# conflict. So a second apt, with its own lists and no installed packages, downloads the arm64
# packages and all that they need, and they are unpacked into the sysroot. Sources and settings are
# those of the host.
unpack_sysroot() {
  local apt=$PWD/build-arm/apt lib=$sysroot/usr/lib/aarch64-linux-gnu database=$sysroot/var/lib/dpkg package link
  mkdir -p "$apt"/{lists,cache}/partial "$apt"/cache/archives/partial
  : >"$apt/status"
  cat >"$apt/apt.conf" <<END
APT::Architecture "arm64";
#clear APT::Architectures;
APT::Architectures "arm64";
Dir::State "$apt";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
END
  APT_CONFIG=$apt/apt.conf apt-get update
  APT_CONFIG=$apt/apt.conf apt-get install -y --no-install-recommends --download-only "${kvzap_arm_libraries[@]}"
  rm -rf "$sysroot"
  mkdir -p "$sysroot"/usr/{bin,lib,sbin} "$database/info"
  for link in bin lib sbin; do ln -s usr/$link "$sysroot/$link"; done
  for package in "$apt"/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$sysroot"
    # dpkg-query --admindir tells which package has a file.
    printf '%s\nStatus: install ok installed\n\n' "$(dpkg-deb -f "$package")" >>"$database/status"
    dpkg-deb --fsys-tarfile "$package" | tar -t | sed -n 's|^\.\(/.*[^/]\)/\?$|\1|p' >"$database/info/$(dpkg-deb -f "$package" Package).list"
  done
  # Links to absolute paths would lead to the host's files.
  while read -r link; do
    ln -sfr "$sysroot$(readlink "$link")" "$link"
  done < <(find "$sysroot" -type l -lname '/*')
  # Links that the packages' scripts set up.
  ln -sfr "$lib"/openblas-pthread/*.so* "$lib"
  # Trilinos names libraries by absolute paths.
  sed -i 's|/usr/lib/aarch64-linux-gnu/lib|${CMAKE_SYSROOT}&|g' "$lib"/cmake/Kokkos*/*.cmake
  rm -rf "$apt/cache"
  echo "${kvzap_arm_libraries[*]}" >"$sysroot/packages"
}

# kvzap_arm_sysroot: unpacks the packages into $sysroot, unless the same are there.
kvzap_arm_sysroot() {
  if [ "$(cat "$sysroot/packages" 2>/dev/null)" = "${kvzap_arm_libraries[*]}" ]; then return; fi
  echo "Unpacking arm64 packages into build-arm/sysroot ..." >&2
  mkdir -p build-arm
  unpack_sysroot >build-arm/sysroot.log 2>&1 &  # in the background, where a failed command ends it
  wait $! || {
    tail -n 60 build-arm/sysroot.log >&2
    echo "The sysroot is not complete; the whole log is build-arm/sysroot.log." >&2
    exit 1
  }
}

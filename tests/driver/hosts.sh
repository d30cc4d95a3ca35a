#!/bin/bash
# Several hosts on this machine, for tests of MPI over a network.
#
#   unshare --net --mount --uts --ipc --pid --fork --kill-child --mount-proc \
#       hosts.sh run COUNT FOLDER SHARED COMMAND...
#   hosts.sh enter FOLDER HOST COMMAND...    (in place of ssh)
#
# Makes the hosts host1 to hostCOUNT, runs COMMAND on host1 and returns its exit status. Each host has
# its own name, address, processes, System V memory, /tmp and /dev/shm. SHARED lists folders, separated
# by colons, that all hosts see, as on a shared file system. FOLDER gets files about the hosts. host1
# consists of the namespaces that unshare has made. The kernel removes all hosts when COMMAND ends or
# unshare is killed.
set -eu
script=$(realpath "$0")

own_places() {  # replaces /tmp and /dev/shm by empty ones; SHARED stays visible
  local IFS=: empty=$folder/empty all=$shared:$folder path
  mount -t tmpfs tmpfs /dev/shm
  mount --bind "$folder/names" /etc/hosts
  mkdir -p "$empty"
  mount -t tmpfs tmpfs "$empty"
  for path in $all; do
    case $path in
    /tmp/*)
      mkdir -p "$empty/${path#/tmp/}"
      mount --rbind "$path" "$empty/${path#/tmp/}"
      ;;
    esac
  done
  mount --rbind "$empty" /tmp
}

be_host() {  # the first process of a further host
  hostname "$1"
  own_places
  touch "$folder/$1.ready"
  exec sleep infinity
}

add_host() {
  local host=$1 address=$2 pid
  # The shell of this host sees the process `unshare`, which is in all new namespaces except that of
  # processes.
  unshare --net --mount --uts --ipc --pid --fork --kill-child --mount-proc \
    "$script" host "$folder" "$shared" "$host" </dev/null &
  pid=$!
  echo "$pid" >"$folder/$host"
  until [ -e "$folder/$host.ready" ]; do
    kill -0 "$pid"
    sleep 0.01
  done
  ip link add "$host" master eth0 up type veth peer name eth0 netns "$pid"
  nsenter --target "$pid" --net sh -c \
    "ip link set lo up && ip address add $address/24 dev eth0 && ip link set eth0 up"
}

mode=$1
shift
case $mode in
run)
  count=$1 folder=$2 shared=$3
  shift 3
  echo "127.0.0.1 localhost" >"$folder/names"
  for ((i = 1; i <= count; ++i)); do echo "10.77.0.$i host$i" >>"$folder/names"; done
  hostname host1
  ip link set lo up
  ip link add eth0 type bridge
  ip address add 10.77.0.1/24 dev eth0
  ip link set eth0 up
  for ((i = 2; i <= count; ++i)); do add_host "host$i" "10.77.0.$i"; done
  own_places
  export OMPI_MCA_plm_rsh_agent="$script enter $folder"
  "$@" || exit $?
  ;;
host)
  folder=$1 shared=$2
  be_host "$3"
  ;;
enter)
  pid=$(cat "$1/$2")
  shift 2
  exec nsenter --target "$pid" --net --mount --uts --ipc --pid="/proc/$pid/ns/pid_for_children" sh -c "$*"
  ;;
esac

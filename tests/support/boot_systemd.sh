#!/usr/bin/env bash
# Boots a real systemd on an overlay of this host's root, in namespaces of its own. Needs root and Debian's systemd.
#   boot_systemd.sh start FOLDER   mounts a tmpfs on FOLDER, boots, and writes the pid of its init, as seen from outside
#   boot_systemd.sh stop FOLDER    ends it and unmounts everything
# Nothing of the host's services is started: the only target is empty. All that is written goes into the tmpfs.
set -eu
verb=$1; dir=$2
case $verb in
  start)
    mkdir -p "$dir"; mount -t tmpfs tmpfs "$dir"
    mkdir -p "$dir"/{upper,work,root}
    cat > "$dir/init" <<'I'
set -e
dir=$1; R=$dir/root
mount --make-rprivate /
mount -t overlay overlay -o lowerdir=/,upperdir="$dir/upper",workdir="$dir/work" "$R"
mount -t proc proc "$R/proc"; mount -t sysfs sysfs "$R/sys" || mount --rbind /sys "$R/sys"
mount -t tmpfs tmpfs "$R/run"; mount --rbind /dev "$R/dev"
mount -t tmpfs tmpfs "$R/sys/fs/cgroup"; mkdir -p "$R/sys/fs/cgroup/systemd" "$R/sys/fs/cgroup/unified"
mount -t cgroup2 cgroup2 "$R/sys/fs/cgroup/unified" || true
mount -t cgroup -o none,name=systemd,xattr cgroup "$R/sys/fs/cgroup/systemd" \
  || mount -t cgroup -o none,name=systemd cgroup "$R/sys/fs/cgroup/systemd"
# Where cgroup v1 counts the memory of this host, systemd bounds that of a unit there, and else in the hierarchy of v2.
mkdir "$R/sys/fs/cgroup/memory"
mount -t cgroup -o memory cgroup "$R/sys/fs/cgroup/memory" || rmdir "$R/sys/fs/cgroup/memory"
printf '[Unit]\nDescription=nothing but a manager\nDefaultDependencies=no\n' > "$R/etc/systemd/system/empty.target"
cd "$R"; mkdir -p .old; pivot_root . .old; umount -l /.old
# As on a real host: without this the credentials that systemd mounts for a unit do not reach it.
mount --make-rshared /
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=empty.target \
  --log-target=console --log-level=warning --show-status=no
I
    setsid unshare --mount --pid --uts --ipc --net --cgroup --fork bash "$dir/init" "$dir" > "$dir/boot.log" 2>&1 < /dev/null &
    outer=$!
    for _ in $(seq 100); do
      sleep 0.1; pid=$(pgrep -P "$outer" | head -1) || true
      [ -n "${pid:-}" ] && nsenter -t "$pid" -m -p -u -i -n -C systemctl is-system-running 2>/dev/null \
        | grep -qE 'running|degraded|starting' && { echo "$outer" > "$dir/outer"; echo "$pid" > "$dir/pid"; exit 0; }
    done
    kill -9 "$outer" ${pid:-} 2>/dev/null || true
    cat "$dir/boot.log" >&2; umount -R "$dir" 2>/dev/null || umount -l "$dir"; exit 1 ;;
  stop)
    kill -s RTMIN+14 "$(cat "$dir/pid")" 2>/dev/null || true; sleep 0.5
    kill -9 "$(cat "$dir/pid")" "$(cat "$dir/outer")" 2>/dev/null || true
    umount -R "$dir" 2>/dev/null || umount -l "$dir" ;;
  *) echo "usage: boot_systemd.sh start|stop FOLDER" >&2; exit 2 ;;
esac

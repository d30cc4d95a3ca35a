// See io_faults.h. Forms of 64 bits are functions of their own in glibc, and those that it puts in
// the place of others when programs are built with _FORTIFY_SOURCE too.
#define _GNU_SOURCE
#include "io_faults.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

// What a call does, which decides on the faults that may hit it.
enum {
  TRANSFERS = 1,      // may do half
  CHANGES = 2,        // the file's content, or whether it is on the disk
  TAKES_SPACE = 4,    // of a file system
  INTERRUPTIBLE = 8,  // by a signal
  READS = 16
};

enum fault {
  NO_FAULT,
  EIO_ONCE,
  ENOSPC_ONCE,
  EINTR_ONCE,
  SHORT_ONCE,
  EIO_ON,
  ENOSPC_ON,
  KILL,
  TORN
};
static const char* const fault_names[] = {"",       "eio",       "enospc", "eintr", "short",
                                          "eio-on", "enospc-on", "kill",   "torn"};

static char folder_text[PATH_MAX];
static size_t folder_length;
static enum fault the_fault;
static long the_call;
static int log_file = -1;
static atomic_bool is_armed;
static atomic_long calls;
static atomic_bool was_hit;
static char hit[PATH_MAX + 64];

// What is to be done with one call.
struct action {
  int error;   // fail with it
  bool halve;  // do half
  bool die;    // afterwards
};

static void* next_function(const char* name) {
  void* const function = dlsym(RTLD_NEXT, name);
  if (!function) abort();
  return function;
}

// The next library's function of the same name and type.
#define NEXT(name) ((__typeof__(&name))next_function(#name))

static bool is_watched_name(const char* name) {
  return strncmp(name, folder_text, folder_length) == 0 &&
         (name[folder_length] == '\0' || name[folder_length] == '/');
}

static bool name_of_descriptor(int descriptor, char* name) {
  char link[64];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", descriptor);
  const ssize_t length = readlink(link, name, PATH_MAX - 1);
  if (length < 0) return false;
  name[length] = '\0';
  return true;
}

// The whole name of a file that a call names, in `whole` (PATH_MAX bytes), or NULL if it is not
// watched.
static const char* watched_path(int folder, const char* path, char* whole) {
  if (!atomic_load(&is_armed) || !path) return NULL;
  if (path[0] == '/') return is_watched_name(path) ? path : NULL;
  if (folder == AT_FDCWD ? !getcwd(whole, PATH_MAX) : !name_of_descriptor(folder, whole))
    return NULL;
  const size_t length = strlen(whole);
  if (length + 1 + strlen(path) >= PATH_MAX) return NULL;
  whole[length] = '/';
  strcpy(whole + length + 1, path);
  return is_watched_name(whole) ? whole : NULL;
}

static const char* watched_descriptor(int descriptor, char* whole) {
  if (!atomic_load(&is_armed)) return NULL;
  return name_of_descriptor(descriptor, whole) && is_watched_name(whole) ? whole : NULL;
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static bool hits(int kind, long n) {
  switch (the_fault) {
    case EIO_ONCE:
    case KILL:
    case TORN:
      return n == the_call;
    case ENOSPC_ONCE:
      return n == the_call && !(kind & READS);
    case EINTR_ONCE:
      return n == the_call && (kind & INTERRUPTIBLE);
    case SHORT_ONCE:
      return n == the_call && (kind & TRANSFERS);
    case EIO_ON:
      return n >= the_call && (kind & CHANGES);
    case ENOSPC_ON:
      return n >= the_call && (kind & TAKES_SPACE);
    default:
      return false;
  }
}

static struct action decide(const char* name, int kind, const char* file) {
  struct action action = {0, false, false};
  if (!file) return action;
  const int saved = errno;
  const long n = atomic_fetch_add(&calls, 1) + 1;
  const bool is_hit = the_call > 0 && hits(kind, n);
  if (log_file >= 0) {
    char line[PATH_MAX + 128];
    const int length = snprintf(line, sizeof(line), "%ld %s %s%s%s\n", n, name, file,
                                is_hit ? " " : "", is_hit ? fault_names[the_fault] : "");
    const ssize_t ignored = NEXT(write)(log_file, line, (size_t)length);
    (void)ignored;
  }
  if (is_hit) {
    if (!atomic_exchange(&was_hit, true)) snprintf(hit, sizeof(hit), "%s %s", name, file);
    switch (the_fault) {
      case EIO_ONCE:
      case EIO_ON:
        action.error = EIO;
        break;
      case ENOSPC_ONCE:
      case ENOSPC_ON:
        action.error = ENOSPC;
        break;
      case EINTR_ONCE:
        action.error = EINTR;
        break;
      case SHORT_ONCE:
        action.halve = true;
        break;
      case KILL:
        die();
        break;
      default:
        action.halve = (kind & TRANSFERS) != 0;
        action.die = true;
    }
  }
  errno = saved;
  return action;
}

int kvzap_io_faults_arm(const char* folder, const char* fault, long call) {
  atomic_store(&is_armed, false);
  atomic_store(&calls, 0);
  atomic_store(&was_hit, false);
  hit[0] = '\0';
  the_fault = NO_FAULT;
  the_call = call;
  for (int i = EIO_ONCE; i <= TORN; ++i) {
    if (strcmp(fault, fault_names[i]) == 0) the_fault = (enum fault)i;
  }
  if (the_fault == NO_FAULT || folder[0] != '/' || strlen(folder) >= PATH_MAX) return -1;
  strcpy(folder_text, folder);
  folder_length = strlen(folder_text);
  while (folder_length > 1 && folder_text[folder_length - 1] == '/')
    folder_text[--folder_length] = '\0';
  atomic_store(&is_armed, true);
  return 0;
}

void kvzap_io_faults_disarm(void) { atomic_store(&is_armed, false); }
long kvzap_io_faults_calls(void) { return atomic_load(&calls); }
const char* kvzap_io_faults_hit(void) { return hit; }

__attribute__((constructor)) static void arm_by_environment(void) {
  const char* const folder = getenv("KVZAP_IO_FAULTS_FOLDER");
  if (!folder) return;
  const char* const rank = getenv("KVZAP_IO_FAULTS_RANK");
  const char* mine = NULL;
  static const char* const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK",
                                      "SLURM_PROCID"};
  for (size_t i = 0; i < sizeof(names) / sizeof(names[0]) && !mine; ++i) mine = getenv(names[i]);
  if (rank && strcmp(rank, mine ? mine : "0") != 0) return;
  const char* const log = getenv("KVZAP_IO_FAULTS_LOG");
  if (log) log_file = NEXT(open)(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  const char* const fault = getenv("KVZAP_IO_FAULTS_FAULT");
  const char* const call = getenv("KVZAP_IO_FAULTS_CALL");
  if (kvzap_io_faults_arm(folder, fault ? fault : "eio", call ? atol(call) : 0) != 0) {
    fprintf(stderr, "io_faults: unknown fault, or a folder that is not absolute\n");
    abort();
  }
}

static long end(struct action action, long result) {
  if (action.die) die();
  return result;
}

#define FAIL_IF_ASKED(action, failure) \
  if ((action).error) {                \
    errno = (action).error;            \
    return failure;                    \
  }

static size_t size_of_part(struct action action, size_t bytes) {
  return action.halve ? (bytes + 1) / 2 : bytes;
}

// Opening.

static int kind_of_open(int flags) {
  return INTERRUPTIBLE | (flags & O_CREAT                   ? TAKES_SPACE | CHANGES
                          : (flags & O_ACCMODE) == O_RDONLY ? READS
                                                            : 0);
}

static mode_t mode_of(int flags, va_list* list) {
  return flags & (O_CREAT | O_TMPFILE) ? va_arg(*list, mode_t) : 0;
}

#define OPEN(name)                                                               \
  int name(const char* path, int flags, ...) {                                   \
    va_list list;                                                                \
    va_start(list, flags);                                                       \
    const mode_t mode = mode_of(flags, &list);                                   \
    va_end(list);                                                                \
    char whole[PATH_MAX];                                                        \
    const struct action action =                                                 \
        decide(#name, kind_of_open(flags), watched_path(AT_FDCWD, path, whole)); \
    FAIL_IF_ASKED(action, -1)                                                    \
    return (int)end(action, NEXT(name)(path, flags, mode));                      \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                           \
  int name(int folder, const char* path, int flags, ...) {                     \
    va_list list;                                                              \
    va_start(list, flags);                                                     \
    const mode_t mode = mode_of(flags, &list);                                 \
    va_end(list);                                                              \
    char whole[PATH_MAX];                                                      \
    const struct action action =                                               \
        decide(#name, kind_of_open(flags), watched_path(folder, path, whole)); \
    FAIL_IF_ASKED(action, -1)                                                  \
    return (int)end(action, NEXT(name)(folder, path, flags, mode));            \
  }
OPENAT(openat)
OPENAT(openat64)

int __open_2(const char* path, int flags) { return open(path, flags); }
int __open64_2(const char* path, int flags) { return open64(path, flags); }
int __openat_2(int folder, const char* path, int flags) { return openat(folder, path, flags); }
int __openat64_2(int folder, const char* path, int flags) { return openat64(folder, path, flags); }
int creat(const char* path, mode_t mode) { return open(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
int creat64(const char* path, mode_t mode) {
  return open64(path, O_WRONLY | O_CREAT | O_TRUNC, mode);
}

int close(int descriptor) {
  char whole[PATH_MAX];
  const struct action action =
      decide("close", INTERRUPTIBLE | CHANGES, watched_descriptor(descriptor, whole));
  const int result = (int)end(action, NEXT(close)(descriptor));
  FAIL_IF_ASKED(action, -1)
  return result;
}

// Writing and reading.

#define WRITES (TRANSFERS | CHANGES | TAKES_SPACE | INTERRUPTIBLE)
#define READING (TRANSFERS | READS | INTERRUPTIBLE)

#define TRANSFER(name, Data, kind)                                                           \
  ssize_t name(int descriptor, Data data, size_t bytes) {                                    \
    char whole[PATH_MAX];                                                                    \
    const struct action action = decide(#name, kind, watched_descriptor(descriptor, whole)); \
    FAIL_IF_ASKED(action, -1)                                                                \
    return end(action, NEXT(name)(descriptor, data, size_of_part(action, bytes)));           \
  }
TRANSFER(write, const void*, WRITES)
TRANSFER(read, void*, READING)

#define TRANSFER_AT(name, Data, Offset, kind)                                                \
  ssize_t name(int descriptor, Data data, size_t bytes, Offset offset) {                     \
    char whole[PATH_MAX];                                                                    \
    const struct action action = decide(#name, kind, watched_descriptor(descriptor, whole)); \
    FAIL_IF_ASKED(action, -1)                                                                \
    return end(action, NEXT(name)(descriptor, data, size_of_part(action, bytes), offset));   \
  }
TRANSFER_AT(pwrite, const void*, off_t, WRITES)
TRANSFER_AT(pwrite64, const void*, off64_t, WRITES)
TRANSFER_AT(pread, void*, off_t, READING)
TRANSFER_AT(pread64, void*, off64_t, READING)

ssize_t __read_chk(int descriptor, void* data, size_t bytes, size_t room) {
  if (bytes > room) abort();
  return read(descriptor, data, bytes);
}
ssize_t __pread_chk(int descriptor, void* data, size_t bytes, off_t offset, size_t room) {
  if (bytes > room) abort();
  return pread(descriptor, data, bytes, offset);
}
ssize_t __pread64_chk(int descriptor, void* data, size_t bytes, off64_t offset, size_t room) {
  if (bytes > room) abort();
  return pread64(descriptor, data, bytes, offset);
}

// Half of what several pieces are: half of them, or of a single one half.
static int part_of_pieces(struct action action, const struct iovec** pieces, int count,
                          struct iovec* first) {
  if (!action.halve || count <= 0) return count;
  if (count > 1) return count / 2;
  *first = (*pieces)[0];
  first->iov_len = (first->iov_len + 1) / 2;
  *pieces = first;
  return 1;
}

#define VECTOR(name, kind)                                                                   \
  ssize_t name(int descriptor, const struct iovec* pieces, int count) {                      \
    char whole[PATH_MAX];                                                                    \
    struct iovec first;                                                                      \
    const struct action action = decide(#name, kind, watched_descriptor(descriptor, whole)); \
    FAIL_IF_ASKED(action, -1)                                                                \
    const int n = part_of_pieces(action, &pieces, count, &first);                            \
    return end(action, NEXT(name)(descriptor, pieces, n));                                   \
  }
VECTOR(writev, WRITES)
VECTOR(readv, READING)

#define VECTOR_AT(name, Offset, kind)                                                        \
  ssize_t name(int descriptor, const struct iovec* pieces, int count, Offset offset) {       \
    char whole[PATH_MAX];                                                                    \
    struct iovec first;                                                                      \
    const struct action action = decide(#name, kind, watched_descriptor(descriptor, whole)); \
    FAIL_IF_ASKED(action, -1)                                                                \
    const int n = part_of_pieces(action, &pieces, count, &first);                            \
    return end(action, NEXT(name)(descriptor, pieces, n, offset));                           \
  }
VECTOR_AT(pwritev, off_t, WRITES)
VECTOR_AT(pwritev64, off64_t, WRITES)
VECTOR_AT(preadv, off_t, READING)
VECTOR_AT(preadv64, off64_t, READING)

ssize_t copy_file_range(int from, off64_t* from_offset, int to, off64_t* to_offset, size_t bytes,
                        unsigned int flags) {
  char whole[PATH_MAX];
  const struct action action = decide("copy_file_range", WRITES, watched_descriptor(to, whole));
  FAIL_IF_ASKED(action, -1)
  return end(action, NEXT(copy_file_range)(from, from_offset, to, to_offset,
                                           size_of_part(action, bytes), flags));
}

// Space, and the way to the disk.

#define ON_DESCRIPTOR(name, parameters, arguments, kind)                                     \
  int name parameters {                                                                      \
    char whole[PATH_MAX];                                                                    \
    const struct action action = decide(#name, kind, watched_descriptor(descriptor, whole)); \
    FAIL_IF_ASKED(action, -1)                                                                \
    return (int)end(action, NEXT(name) arguments);                                           \
  }
ON_DESCRIPTOR(fsync, (int descriptor), (descriptor), CHANGES | INTERRUPTIBLE)
ON_DESCRIPTOR(fdatasync, (int descriptor), (descriptor), CHANGES | INTERRUPTIBLE)
ON_DESCRIPTOR(sync_file_range, (int descriptor, off64_t offset, off64_t bytes, unsigned int flags),
              (descriptor, offset, bytes, flags), CHANGES)
ON_DESCRIPTOR(ftruncate, (int descriptor, off_t length), (descriptor, length),
              CHANGES | TAKES_SPACE | INTERRUPTIBLE)
ON_DESCRIPTOR(ftruncate64, (int descriptor, off64_t length), (descriptor, length),
              CHANGES | TAKES_SPACE | INTERRUPTIBLE)
ON_DESCRIPTOR(fallocate, (int descriptor, int mode, off_t offset, off_t bytes),
              (descriptor, mode, offset, bytes), CHANGES | TAKES_SPACE | INTERRUPTIBLE)
ON_DESCRIPTOR(fallocate64, (int descriptor, int mode, off64_t offset, off64_t bytes),
              (descriptor, mode, offset, bytes), CHANGES | TAKES_SPACE | INTERRUPTIBLE)

// These return the error.
#define POSIX_FALLOCATE(name, Offset)                                                 \
  int name(int descriptor, Offset offset, Offset bytes) {                             \
    char whole[PATH_MAX];                                                             \
    const struct action action = decide(#name, CHANGES | TAKES_SPACE | INTERRUPTIBLE, \
                                        watched_descriptor(descriptor, whole));       \
    if (action.error) return action.error;                                            \
    return (int)end(action, NEXT(name)(descriptor, offset, bytes));                   \
  }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

// Names.

#define ON_PATH(name, parameters, arguments, kind)                                         \
  int name parameters {                                                                    \
    char whole[PATH_MAX];                                                                  \
    const struct action action = decide(#name, kind, watched_path(AT_FDCWD, path, whole)); \
    FAIL_IF_ASKED(action, -1)                                                              \
    return (int)end(action, NEXT(name) arguments);                                         \
  }
ON_PATH(truncate, (const char* path, off_t length), (path, length),
        CHANGES | TAKES_SPACE | INTERRUPTIBLE)
ON_PATH(truncate64, (const char* path, off64_t length), (path, length),
        CHANGES | TAKES_SPACE | INTERRUPTIBLE)
ON_PATH(unlink, (const char* path), (path), 0)
ON_PATH(remove, (const char* path), (path), 0)

int unlinkat(int folder, const char* path, int flags) {
  char whole[PATH_MAX];
  const struct action action = decide("unlinkat", 0, watched_path(folder, path, whole));
  FAIL_IF_ASKED(action, -1)
  return (int)end(action, NEXT(unlinkat)(folder, path, flags));
}

// Of two names the new one counts.
#define TWO_NAMES(name, kind)                                                              \
  int name(const char* from, const char* path) {                                           \
    char whole[PATH_MAX];                                                                  \
    const struct action action = decide(#name, kind, watched_path(AT_FDCWD, path, whole)); \
    FAIL_IF_ASKED(action, -1)                                                              \
    return (int)end(action, NEXT(name)(from, path));                                       \
  }
TWO_NAMES(rename, CHANGES)
TWO_NAMES(link, CHANGES | TAKES_SPACE)
TWO_NAMES(symlink, CHANGES | TAKES_SPACE)

int renameat(int from_folder, const char* from, int folder, const char* path) {
  char whole[PATH_MAX];
  const struct action action = decide("renameat", CHANGES, watched_path(folder, path, whole));
  FAIL_IF_ASKED(action, -1)
  return (int)end(action, NEXT(renameat)(from_folder, from, folder, path));
}

int renameat2(int from_folder, const char* from, int folder, const char* path, unsigned int flags) {
  char whole[PATH_MAX];
  const struct action action = decide("renameat2", CHANGES, watched_path(folder, path, whole));
  FAIL_IF_ASKED(action, -1)
  return (int)end(action, NEXT(renameat2)(from_folder, from, folder, path, flags));
}

int linkat(int from_folder, const char* from, int folder, const char* path, int flags) {
  char whole[PATH_MAX];
  const struct action action =
      decide("linkat", CHANGES | TAKES_SPACE, watched_path(folder, path, whole));
  FAIL_IF_ASKED(action, -1)
  return (int)end(action, NEXT(linkat)(from_folder, from, folder, path, flags));
}

/* A disk that refuses. Loaded by LD_PRELOAD, idle until threestep_refuse() is called.

   Every call of the C library that changes what lies below the given folders is counted. One of them, or all from one
   on, fail with the given error, and nothing is written. What is refused is as a file system would: a full disk (from
   one on) still removes, renames in place, cuts and closes. glibc's own calls of itself, as inside fwrite, cannot be
   seen: fopen for writing is counted instead. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folders[4][PATH_MAX];
static int folder_count = 0, journal = -1;
static long first = 0, last = 0, calls = 0; /* of the calls, counted from 1, which fail; 0: none */
static int refusal = 0;
static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;

/* paths: separated by newlines. from, to: the calls that fail. log: what is counted goes to that file. */
void threestep_refuse(const char *paths, long from, long to, int number, const char *log) {
    char all[4 * PATH_MAX];
    snprintf(all, sizeof all, "%s", paths);
    folder_count = 0;
    char *rest = NULL;
    for (char *part = strtok_r(all, "\n", &rest); part && folder_count < 4; part = strtok_r(NULL, "\n", &rest))
        snprintf(folders[folder_count++], PATH_MAX, "%s", part);
    first = from, last = to, refusal = number, calls = 0;
    journal = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

long threestep_counted(void) { return calls; }

static int below(const char *path) {
    for (int place = 0; place < folder_count; place++) {
        size_t length = strlen(folders[place]);
        if (!strncmp(path, folders[place], length) && (path[length] == 0 || path[length] == '/')) return 1;
    }
    return 0;
}

static int path_of(int handle, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length > 0 ? length : 0] = 0;
    return length > 0;
}

static void absolute(int folder, const char *path, char *out) {
    char base[PATH_MAX] = "";
    if (path[0] == '/') {
        snprintf(out, 2 * PATH_MAX, "%s", path);
        return;
    }
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) base[0] = 0;
    } else
        path_of(folder, base);
    snprintf(out, 2 * PATH_MAX, "%s/%s", base, path);
}

/* Whether this call fails; errno is set. frees: a full disk does it all the same. */
static int refused(const char *what, const char *path, int frees) {
    if (!folder_count || !below(path)) return 0;
    pthread_mutex_lock(&one);
    long number = ++calls;
    int fails = number >= first && number <= last && first > 0 && !(frees && last > first);
    if (journal >= 0) {
        char line[2 * PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%ld %s %s%s\n", number, what, path, fails ? " REFUSED" : "");
        syscall(SYS_write, journal, line, (size_t)length);
    }
    pthread_mutex_unlock(&one);
    if (fails) errno = refusal;
    return fails;
}

static int refused_at(const char *what, int folder, const char *path, int frees) {
    if (!folder_count || !path) return 0;
    char whole[2 * PATH_MAX];
    absolute(folder, path, whole);
    return refused(what, whole, frees);
}

static int refused_of(const char *what, int handle, int frees) {
    if (!folder_count || handle < 0) return 0;
    int before = errno;
    char path[PATH_MAX];
    if (!path_of(handle, path)) {
        errno = before;
        return 0;
    }
    int fails = refused(what, path, frees);
    if (!fails) errno = before;
    return fails;
}

#define REAL(name) ((__typeof__(&name))({ static void *found; if (!found) found = dlsym(RTLD_NEXT, #name); found; }))
#define WITH_HANDLE(kind, name, words, passed, frees) \
    kind name words { return refused_of(#name, handle, frees) ? -1 : REAL(name) passed; }
#define WITH_PATH(name, words, passed, frees) \
    int name words { return refused_at(#name, AT_FDCWD, path, frees) ? -1 : REAL(name) passed; }

WITH_HANDLE(ssize_t, write, (int handle, const void *from, size_t size), (handle, from, size), 0)
WITH_HANDLE(ssize_t, writev, (int handle, const struct iovec *from, int parts), (handle, from, parts), 0)
WITH_HANDLE(ssize_t, pwrite, (int handle, const void *from, size_t size, off_t at), (handle, from, size, at), 0)
WITH_HANDLE(ssize_t, pwrite64, (int handle, const void *from, size_t size, off64_t at), (handle, from, size, at), 0)
WITH_HANDLE(int, fsync, (int handle), (handle), 0)
WITH_HANDLE(int, fdatasync, (int handle), (handle), 0)
WITH_HANDLE(int, ftruncate, (int handle, off_t size), (handle, size), 0)
WITH_HANDLE(int, ftruncate64, (int handle, off64_t size), (handle, size), 0)
WITH_HANDLE(int, fallocate, (int handle, int mode, off_t at, off_t size), (handle, mode, at, size), 0)
WITH_HANDLE(int, fchmod, (int handle, mode_t mode), (handle, mode), 1)
WITH_HANDLE(ssize_t, sendfile, (int handle, int from, off_t *at, size_t size), (handle, from, at, size), 0)
WITH_HANDLE(ssize_t, sendfile64, (int handle, int from, off64_t *at, size_t size), (handle, from, at, size), 0)
WITH_PATH(mkdir, (const char *path, mode_t mode), (path, mode), 0)
WITH_PATH(rmdir, (const char *path), (path), 1)
WITH_PATH(unlink, (const char *path), (path), 1)
WITH_PATH(chmod, (const char *path, mode_t mode), (path, mode), 1)
WITH_PATH(truncate, (const char *path, off_t size), (path, size), 1)
WITH_PATH(truncate64, (const char *path, off64_t size), (path, size), 1)

ssize_t copy_file_range(int from, off64_t *at, int handle, off64_t *to, size_t size, unsigned flags) {
    return refused_of("copy_file_range", handle, 0) ? -1 : REAL(copy_file_range)(from, at, handle, to, size, flags);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    return refused_at("mkdirat", folder, path, 0) ? -1 : REAL(mkdirat)(folder, path, mode);
}

int unlinkat(int folder, const char *path, int flags) {
    return refused_at("unlinkat", folder, path, 1) ? -1 : REAL(unlinkat)(folder, path, flags);
}

int rename(const char *from, const char *path) {
    return refused_at("rename", AT_FDCWD, path, 0) ? -1 : REAL(rename)(from, path);
}

int renameat(int source, const char *from, int folder, const char *path) {
    return refused_at("renameat", folder, path, 0) ? -1 : REAL(renameat)(source, from, folder, path);
}

int renameat2(int source, const char *from, int folder, const char *path, unsigned flags) {
    return refused_at("renameat2", folder, path, 0) ? -1 : REAL(renameat2)(source, from, folder, path, flags);
}

/* A failed close has closed: NFS says there that what was written did not arrive. */
int close(int handle) {
    int writes = 0, fails = 0;
    if (folder_count) {
        int flags = fcntl(handle, F_GETFL);
        writes = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
    }
    if (writes) fails = refused_of("close", handle, 1);
    int result = (int)syscall(SYS_close, handle);
    if (fails) errno = refusal;
    return fails ? -1 : result;
}

static int makes(int flags) { return (flags & (O_CREAT | O_TRUNC)) || (flags & O_ACCMODE) != O_RDONLY; }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (makes(flags) && refused_at(#name, AT_FDCWD, path, 0)) return -1; \
        return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (makes(flags) && refused_at(#name, folder, path, 0)) return -1; \
        return (int)syscall(SYS_openat, folder, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

FILE *fopen(const char *path, const char *mode) {
    if (strpbrk(mode, "wa+") && refused_at("fopen", AT_FDCWD, path, 0)) return NULL;
    return REAL(fopen)(path, mode);
}

FILE *fopen64(const char *path, const char *mode) {
    if (strpbrk(mode, "wa+") && refused_at("fopen64", AT_FDCWD, path, 0)) return NULL;
    return REAL(fopen64)(path, mode);
}

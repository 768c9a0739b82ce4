/* Loaded before the C library (LD_PRELOAD): counts what a process does to the files below one directory, and at the
 * chosen operation kills the process or lets the disk be full. Python, torch (C++) and safetensors (Rust) all write
 * through these functions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, COUNT, KILL, FULL };

static char directory[4096];
static int mode = OFF, error = ENOSPC;
static long at, operations;

/* At operation number `first` (from 1) and, where the disk is full, at all later ones; they fail with `new_error`. */
void fault_arm(const char *path, int new_mode, long first, int new_error) {
    snprintf(directory, sizeof directory, "%s", path);
    operations = 0, at = first, error = new_error, mode = new_mode;
}

long fault_disarm(void) {
    mode = OFF;
    return operations;
}

static int below(const char *path) { return strncmp(path, directory, strlen(directory)) == 0; }

static int fd_below(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

/* Whether the operation fails for want of space; a kill does not return. */
static int struck(void) {
    operations++;
    if (mode == KILL && operations == at) kill(getpid(), SIGKILL);
    return mode == FULL && operations >= at;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (mode == OFF || !fd_below(fd)) return real(fd, data, size);
    /* The half of it that still went to the disk before the kill. */
    if (mode == KILL && operations + 1 == at && size > 1) real(fd, data, size / 2);
    if (struck()) return errno = error, -1;
    return real(fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    if (mode != OFF && fd_below(fd) && struck()) return errno = error, -1;
    return real(fd, parts, count);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64);
    if (mode != OFF && fd_below(fd) && struck()) return errno = error, -1;
    return real(fd, data, size, offset);
}

int fsync(int fd) {
    REAL(fsync);
    if (mode != OFF && fd_below(fd) && struck()) return errno = error, -1;
    return real(fd);
}

int mkdir(const char *path, mode_t access) {
    REAL(mkdir);
    if (mode != OFF && below(path) && struck()) return errno = error, -1;
    return real(path, access);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    /* Needs no space on most file systems, but some say so. */
    if (mode != OFF && below(to) && struck()) return errno = error, -1;
    return real(from, to);
}

static int opened(const char *path, int flags) {
    return mode != OFF && (flags & O_CREAT) && below(path) && access(path, F_OK) != 0 && struck();
}

#define OPEN(name)                                          \
    int name(const char *path, int flags, ...) {            \
        va_list list;                                       \
        va_start(list, flags);                              \
        mode_t access = va_arg(list, mode_t);               \
        va_end(list);                                       \
        REAL(name);                                         \
        if (opened(path, flags)) return errno = error, -1; \
        return real(path, flags, access);                   \
    }
OPEN(open)
OPEN(open64)

FILE *fopen64(const char *path, const char *how) {
    REAL(fopen64);
    if (opened(path, strchr(how, 'w') ? O_CREAT : 0)) return errno = error, NULL;
    return real(path, how);
}

FILE *fopen(const char *path, const char *how) {
    REAL(fopen);
    if (opened(path, strchr(how, 'w') ? O_CREAT : 0)) return errno = error, NULL;
    return real(path, how);
}

/* What only takes names away: a kill may come here as well. */
int unlink(const char *path) {
    REAL(unlink);
    if (mode == KILL && below(path)) struck();
    return real(path);
}

int unlinkat(int fd, const char *path, int flags) {
    REAL(unlinkat);
    if (mode == KILL && (path[0] == '/' ? below(path) : fd_below(fd))) struck();
    return real(fd, path, flags);
}

int rmdir(const char *path) {
    REAL(rmdir);
    if (mode == KILL && below(path)) struck();
    return real(path);
}

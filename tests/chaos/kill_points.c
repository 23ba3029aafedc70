/* Stops a process at a chosen change of a file, so that a test can kill it there. Preload it into a Python.

   It does nothing without EAGLE31_CHAOS=DIRECTORY in the environment. With it, every call that changes a file
   below CHAOS_ROOT is a point: opening for writing, writing, syncing, renaming, removing, making a directory or
   a link. The points of all processes with the same DIRECTORY are numbered together from 1.

   CHAOS_LOG=1      appends "NUMBER RANK OPERATION PATH" to DIRECTORY/points for each of them.
   CHAOS_OPERATION  only points of this operation count, or of any where it is empty.
   CHAOS_PATTERN    only points at paths below CHAOS_ROOT that match this shell pattern.
   CHAOS_RANK       only points of the process with this RANK, or of any where it is empty.
   CHAOS_NUMBER     the process that reaches this point first does half of a write and none of another change,
                    then writes its id to DIRECTORY/reached and stops (SIGSTOP). */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define ORIGINAL(name, type, ...)                         \
    static type (*original)(__VA_ARGS__);                 \
    if (!original) original = dlsym(RTLD_NEXT, name)

/* The calls of this file go to the kernel directly: they are no points. */
static int raw_open(const char *path, int flags) { return syscall(SYS_openat, AT_FDCWD, path, flags, 0666); }

static const char *setting(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static unsigned *counter(const char *directory) {
    static unsigned *shared;
    char path[PATH_MAX];
    if (shared) return shared;
    snprintf(path, sizeof path, "%s/number", directory);
    int file = raw_open(path, O_RDWR | O_CREAT | O_CLOEXEC);
    if (file < 0 || ftruncate(file, sizeof *shared) != 0) return NULL;
    void *memory = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    return memory == MAP_FAILED ? NULL : (shared = memory);
}

static void note(const char *directory, const char *name, int flags, const char *line) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    int file = raw_open(path, O_WRONLY | O_CREAT | O_CLOEXEC | flags);
    if (file < 0) return; /* another process was first */
    syscall(SYS_write, file, line, strlen(line));
    syscall(SYS_close, file);
    if (flags & O_EXCL) raise(SIGSTOP);
}

/* Returns whether to stop at a path, which is absolute. */
static int is_point(const char *operation, const char *path) {
    const char *directory = setting("EAGLE31_CHAOS"), *root = setting("CHAOS_ROOT");
    if (!directory || !root) return 0;
    size_t length = strlen(root);
    if (strncmp(path, root, length) != 0 || path[length] != '/') return 0;
    const char *only = setting("CHAOS_OPERATION"), *pattern = setting("CHAOS_PATTERN");
    const char *rank = setting("CHAOS_RANK"), *own = setting("RANK"), *number = setting("CHAOS_NUMBER");
    if (only && strcmp(only, operation) != 0) return 0;
    if (pattern && fnmatch(pattern, path + length + 1, 0) != 0) return 0;
    if (rank && (!own || strcmp(rank, own) != 0)) return 0;
    unsigned *count = counter(directory);
    if (!count) return 0;
    unsigned mine = __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
    if (setting("CHAOS_LOG")) {
        char line[PATH_MAX + 64];
        snprintf(line, sizeof line, "%u %s %s %s\n", mine, own ? own : "-", operation, path + length + 1);
        note(directory, "points", O_APPEND, line);
    }
    return number && mine == (unsigned)strtoul(number, NULL, 10);
}

static void reach(void) {
    char line[32];
    snprintf(line, sizeof line, "%d\n", getpid());
    note(getenv("EAGLE31_CHAOS"), "reached", O_EXCL, line);
}

static void at_path(const char *operation, int folder, const char *name) {
    char path[2 * PATH_MAX], link[64];
    if (!setting("EAGLE31_CHAOS")) return;
    int error = errno;
    if (name[0] == '/') {
        snprintf(path, sizeof path, "%s", name);
    } else {
        if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, path, PATH_MAX);
        if (length < 0) length = 0;
        snprintf(path + length, sizeof path - length, "/%s", name);
    }
    if (is_point(operation, path)) reach();
    errno = error;
}

static int at_file(const char *operation, int file) {
    char path[PATH_MAX], link[64];
    if (!setting("EAGLE31_CHAOS")) return 0;
    int error = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) length = 0;
    path[length] = 0;
    int found = is_point(operation, path);
    errno = error;
    return found;
}

static int changes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT; }

#define OPEN(name)                                                     \
    int name(const char *path, int flags, ...) {                       \
        ORIGINAL(#name, int, const char *, int, ...);                  \
        va_list rest;                                                  \
        va_start(rest, flags);                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                  \
        if (changes(flags)) at_path("open", AT_FDCWD, path);           \
        return original(path, flags, mode);                            \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                   \
    int name(int folder, const char *path, int flags, ...) {           \
        ORIGINAL(#name, int, int, const char *, int, ...);             \
        va_list rest;                                                  \
        va_start(rest, flags);                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                  \
        if (changes(flags)) at_path("open", folder, path);             \
        return original(folder, path, flags, mode);                    \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                    \
    FILE *name(const char *path, const char *mode) {                   \
        ORIGINAL(#name, FILE *, const char *, const char *);           \
        if (strpbrk(mode, "wa+")) at_path("open", AT_FDCWD, path);     \
        return original(path, mode);                                   \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int file, const void *content, size_t size) {
    ORIGINAL("write", ssize_t, int, const void *, size_t);
    if (at_file("write", file)) {
        original(file, content, size / 2);
        reach();
        content = (const char *)content + size / 2;
        ssize_t rest = original(file, content, size - size / 2);
        return rest < 0 ? rest : rest + (ssize_t)(size / 2);
    }
    return original(file, content, size);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    ORIGINAL("writev", ssize_t, int, const struct iovec *, int);
    if (at_file("write", file)) {
        if (count > 1) original(file, parts, 1);
        reach();
        if (count > 1) {
            ssize_t rest = original(file, parts + 1, count - 1);
            return rest < 0 ? rest : rest + (ssize_t)parts[0].iov_len;
        }
    }
    return original(file, parts, count);
}

#define PWRITE(name, type)                                             \
    ssize_t name(int file, const void *content, size_t size, type position) { \
        ORIGINAL(#name, ssize_t, int, const void *, size_t, type);     \
        if (at_file("write", file)) {                                  \
            original(file, content, size / 2, position);               \
            reach();                                                   \
        }                                                              \
        return original(file, content, size, position);                \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define ON_FILE(name, operation, parameters, ...)                      \
    int name parameters {                                              \
        static int (*original) parameters;                             \
        if (!original) original = dlsym(RTLD_NEXT, #name);             \
        if (at_file(operation, file)) reach();                         \
        return original(__VA_ARGS__);                                  \
    }
ON_FILE(fsync, "fsync", (int file), file)
ON_FILE(fdatasync, "fsync", (int file), file)
ON_FILE(ftruncate, "truncate", (int file, off_t length), file, length)
ON_FILE(ftruncate64, "truncate", (int file, off64_t length), file, length)

ssize_t sendfile(int file, int from, off_t *offset, size_t size) {
    ORIGINAL("sendfile", ssize_t, int, int, off_t *, size_t);
    if (at_file("write", file)) reach();
    return original(file, from, offset, size);
}

ssize_t copy_file_range(int from, off64_t *start, int file, off64_t *offset, size_t size, unsigned flags) {
    ORIGINAL("copy_file_range", ssize_t, int, off64_t *, int, off64_t *, size_t, unsigned);
    if (at_file("write", file)) reach();
    return original(from, start, file, offset, size, flags);
}

/* A rename is a point at its new name. */
#define AT_PATH(name, operation, folder, path, parameters, ...)        \
    int name parameters {                                              \
        static int (*original) parameters;                             \
        if (!original) original = dlsym(RTLD_NEXT, #name);             \
        at_path(operation, folder, path);                              \
        return original(__VA_ARGS__);                                  \
    }
AT_PATH(rename, "rename", AT_FDCWD, to, (const char *from, const char *to), from, to)
AT_PATH(renameat, "rename", folder, to, (int source, const char *from, int folder, const char *to), source, from,
        folder, to)
AT_PATH(renameat2, "rename", folder, to,
        (int source, const char *from, int folder, const char *to, unsigned flags), source, from, folder, to,
        flags)
AT_PATH(unlink, "remove", AT_FDCWD, path, (const char *path), path)
AT_PATH(unlinkat, "remove", folder, path, (int folder, const char *path, int flags), folder, path, flags)
AT_PATH(rmdir, "remove", AT_FDCWD, path, (const char *path), path)
AT_PATH(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
AT_PATH(mkdirat, "mkdir", folder, path, (int folder, const char *path, mode_t mode), folder, path, mode)
AT_PATH(symlink, "link", AT_FDCWD, path, (const char *target, const char *path), target, path)
AT_PATH(symlinkat, "link", folder, path, (const char *target, int folder, const char *path), target, folder,
        path)

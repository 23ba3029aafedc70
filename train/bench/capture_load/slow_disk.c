/* Makes a disk slow for one process: preload it with SLOW_DISK=DIRECTORY and SLOW_DISK_SWITCH=FILE.

   While FILE exists, writes to files below DIRECTORY take a second per megabyte, and fsync half a second. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FSYNC_MICROSECONDS 500000
#define MICROSECONDS_PER_BYTE 1

static int is_slow(int file) {
    const char *directory = getenv("SLOW_DISK"), *own_switch = getenv("SLOW_DISK_SWITCH");
    char link[64], path[4096];
    if (!directory || !own_switch || access(own_switch, F_OK) != 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length > 0 && strncmp(path, directory, strlen(directory)) == 0;
}

ssize_t write(int file, const void *content, size_t size) {
    static ssize_t (*original)(int, const void *, size_t);
    if (!original) original = dlsym(RTLD_NEXT, "write");
    if (size > 4096 && is_slow(file)) usleep(size * MICROSECONDS_PER_BYTE);
    return original(file, content, size);
}

int fsync(int file) {
    static int (*original)(int);
    if (!original) original = dlsym(RTLD_NEXT, "fsync");
    if (is_slow(file)) usleep(FSYNC_MICROSECONDS);
    return original(file);
}

// Preloaded into a program by tests: lets one system call of a kind fail, kills the program there,
// or changes one of its inputs.
//   OSCAR_FAULT=CALL:NUMBER:HOW   CALL: open, write, sync, rename, alloc, thread or hdf5 (what
//                                 libhdf5 itself allocates); NUMBER: from 1 on, in each process;
//                                 HOW: fail or kill
//   OSCAR_CHANGE=HOW:FILE:OTHER   when FILE has been read and closed for the first time: replace,
//                                 OTHER takes its name; overwrite, it gets the bytes of OTHER
//   OSCAR_FAULT_COUNTS=FILE       the calls of each kind, written when the program ends
// What the C library calls inside itself is not seen: buffered streams, folders, the loader. Opens
// by which libtorch looks at the processor always succeed: without them it crashes before it can
// say so.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { kOpen, kWrite, kSync, kRename, kAlloc, kThread, kHdf5, kKinds };
static const char* const kNames[kKinds] = {"open",  "write",  "sync", "rename",
                                           "alloc", "thread", "hdf5"};
static const int kErrors[kKinds] = {EMFILE, ENOSPC, EIO, EIO, ENOMEM, EAGAIN, ENOMEM};

static atomic_long counts[kKinds];
static int fault_kind = -1, fault_kills = 0;
static long fault_at = 0;
// Of OSCAR_CHANGE, which counts in the first process alone; null when there is nothing to do.
static char *change_file = NULL, *change_other = NULL;
static int change_overwrites = 0;
static pid_t change_by = 0;

// Where the code of libhdf5 lies, which is a part of the program: one stretch, from the first to the
// last of its global functions.
static uintptr_t hdf5_begin = UINTPTR_MAX, hdf5_end = 0;

static void find_functions(const char* file, uintptr_t loaded_at) {
  const ElfW(Ehdr)* header = (const ElfW(Ehdr)*)file;
  const ElfW(Shdr)* sections = (const ElfW(Shdr)*)(file + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const char* names = file + sections[sections[i].sh_link].sh_offset;
    const ElfW(Sym)* symbol = (const ElfW(Sym)*)(file + sections[i].sh_offset);
    const ElfW(Sym)* end = symbol + sections[i].sh_size / sizeof *symbol;
    for (; symbol < end; ++symbol) {
      const char* name = names + symbol->st_name;
      const int is_global = ELF64_ST_BIND(symbol->st_info) == STB_GLOBAL;
      if (!is_global || ELF64_ST_TYPE(symbol->st_info) != STT_FUNC) continue;
      if (symbol->st_shndx == SHN_UNDEF || strncmp(name, "H5", 2) != 0) continue;
      const uintptr_t begin = loaded_at + symbol->st_value;
      if (begin < hdf5_begin) hdf5_begin = begin;
      if (begin + symbol->st_size > hdf5_end) hdf5_end = begin + symbol->st_size;
    }
  }
}

static int find_hdf5(struct dl_phdr_info* program, size_t size, void* nothing) {
  (void)size, (void)nothing;
  const long file = syscall(SYS_openat, AT_FDCWD, "/proc/self/exe", O_RDONLY | O_CLOEXEC, 0);
  struct stat about;
  if (file < 0 || fstat((int)file, &about) != 0) return 1;
  void* const bytes = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE, (int)file, 0);
  syscall(SYS_close, file);
  if (bytes == MAP_FAILED) return 1;
  find_functions(bytes, program->dlpi_addr);
  munmap(bytes, (size_t)about.st_size);
  return 1;  // the program itself is the first
}

__attribute__((constructor)) static void read_environment(void) {
  dl_iterate_phdr(find_hdf5, NULL);
  const char* text = getenv("OSCAR_FAULT");
  for (int kind = 0; text != NULL && kind < kKinds; ++kind) {
    const size_t length = strlen(kNames[kind]);
    if (strncmp(text, kNames[kind], length) != 0 || text[length] != ':') continue;
    char* end = NULL;
    fault_at = strtol(text + length + 1, &end, 10);
    fault_kills = strcmp(end, ":kill") == 0;
    fault_kind = kind;
  }
  const char* change = getenv("OSCAR_CHANGE");
  if (change == NULL) return;
  change_overwrites = strncmp(change, "overwrite:", 10) == 0;
  change_file = strdup(strchr(change, ':') + 1);
  change_other = strchr(change_file, ':');
  *change_other++ = '\0';
  change_by = getpid();
}

__attribute__((destructor)) static void write_counts(void) {
  const char* path = getenv("OSCAR_FAULT_COUNTS");
  if (path == NULL) return;
  char text[256];
  int length = 0;
  for (int kind = 0; kind < kKinds; ++kind) {
    length += snprintf(text + length, sizeof text - (size_t)length, "%s %ld\n", kNames[kind],
                       atomic_load(&counts[kind]));
  }
  const long file = syscall(SYS_openat, AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, 0600);
  if (file >= 0) syscall(SYS_write, file, text, (size_t)length);
}

// Whether this call is the one that fails.
static int fails(int kind) {
  if (atomic_fetch_add(&counts[kind], 1) + 1 != fault_at || kind != fault_kind) return 0;
  if (fault_kills) kill(getpid(), SIGKILL);
  errno = kErrors[kind];
  return 1;
}

static int open_file(int folder, const char* path, int flags, mode_t mode) {
  const int of_machine =
      strncmp(path, "/sys/devices/system/cpu/", 24) == 0 || strcmp(path, "/proc/cpuinfo") == 0;
  return !of_machine && fails(kOpen) ? -1 : (int)syscall(SYS_openat, folder, path, flags, mode);
}

#define MODE_OF(flags)                                         \
  mode_t mode = 0;                                             \
  if (((flags)&O_CREAT) || ((flags)&O_TMPFILE) == O_TMPFILE) { \
    va_list more;                                              \
    va_start(more, flags);                                     \
    mode = va_arg(more, mode_t);                               \
    va_end(more);                                              \
  }

int open(const char* path, int flags, ...) {
  MODE_OF(flags)
  return open_file(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  MODE_OF(flags)
  return open_file(AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  MODE_OF(flags)
  return open_file(folder, path, flags, mode);
}
int openat64(int folder, const char* path, int flags, ...) {
  MODE_OF(flags)
  return open_file(folder, path, flags, mode);
}
FILE* fopen64(const char* path, const char* how) {
  static FILE* (*next)(const char*, const char*) = NULL;
  if (next == NULL) *(void**)&next = dlsym(RTLD_NEXT, "fopen64");
  return fails(kOpen) ? NULL : next(path, how);
}
int mkdirat(int folder, const char* path, mode_t mode) {
  return fails(kOpen) ? -1 : (int)syscall(SYS_mkdirat, folder, path, mode);
}

ssize_t write(int file, const void* bytes, size_t count) {
  return fails(kWrite) ? -1 : syscall(SYS_write, file, bytes, count);
}
ssize_t writev(int file, const struct iovec* parts, int count) {
  return fails(kWrite) ? -1 : syscall(SYS_writev, file, parts, count);
}
ssize_t pwrite(int file, const void* bytes, size_t count, off_t place) {
  return fails(kWrite) ? -1 : syscall(SYS_pwrite64, file, bytes, count, place);
}
ssize_t pwrite64(int file, const void* bytes, size_t count, off64_t place) {
  return fails(kWrite) ? -1 : syscall(SYS_pwrite64, file, bytes, count, place);
}
int ftruncate64(int file, off64_t length) {
  return fails(kWrite) ? -1 : (int)syscall(SYS_ftruncate, file, length);
}

static void overwrite(const char* path, const char* other) {
  char bytes[4096];
  const int from = (int)syscall(SYS_openat, AT_FDCWD, other, O_RDONLY);
  const int to = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY);
  for (long count = 0; (count = syscall(SYS_read, from, bytes, sizeof bytes)) > 0;) {
    if (syscall(SYS_write, to, bytes, (size_t)count) != count) abort();
  }
  syscall(SYS_close, from);
  syscall(SYS_close, to);
}

int close(int file) {
  struct stat closed, named;
  const int done = change_file != NULL && getpid() == change_by && fstat(file, &closed) == 0 &&
                   stat(change_file, &named) == 0 && closed.st_dev == named.st_dev &&
                   closed.st_ino == named.st_ino;
  const int result = (int)syscall(SYS_close, file);
  if (!done) return result;
  const char* path = change_file;
  change_file = NULL;
  if (change_overwrites) {
    overwrite(path, change_other);
  } else if (syscall(SYS_renameat, AT_FDCWD, change_other, AT_FDCWD, path) != 0) {
    abort();
  }
  return result;
}

int fsync(int file) { return fails(kSync) ? -1 : (int)syscall(SYS_fsync, file); }
int syncfs(int file) { return fails(kSync) ? -1 : (int)syscall(SYS_syncfs, file); }

int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  return fails(kRename) ? -1 : (int)syscall(SYS_renameat, from_folder, from, to_folder, to);
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  return fails(kRename) ? -1 : (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
}

void* __libc_malloc(size_t bytes);
void* malloc(size_t bytes) {
  const uintptr_t caller = (uintptr_t)__builtin_return_address(0);
  if (caller >= hdf5_begin && caller < hdf5_end && fails(kHdf5)) return NULL;
  return fails(kAlloc) ? NULL : __libc_malloc(bytes);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*start)(void*),
                   void* with) {
  static int (*next)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) = NULL;
  if (next == NULL) *(void**)&next = dlsym(RTLD_NEXT, "pthread_create");
  return fails(kThread) ? EAGAIN : next(thread, how, start, with);
}

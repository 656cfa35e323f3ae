/* A stand-in for libcuda.so.1: the driver's checkpoint of processes, and the little that a probe's process calls. */
#include <dirent.h>
#include "scenario.h"

enum { RUNNING, LOCKED, CHECKPOINTED };
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, OPERATING_SYSTEM = 304, ILLEGAL_STATE = 401, NOT_FOUND = 500 };
typedef struct { unsigned char bytes[16]; } Uuid;
typedef struct { Uuid old, now; } Pair;
typedef struct { unsigned timeout_ms; } LockArgs;
typedef struct { Pair *pairs; unsigned count; } RestoreArgs;

static void note(const char *call, long pid) {
  FILE *file = open_in_folder("calls", "a");
  if (!file) return;
  fprintf(file, pid ? "%s:%ld\n" : "%s\n", call, pid);
  fclose(file);
}

static void put(const char *kind, long pid, const char *text) {
  char name[64], path[4096], beside[4200];
  snprintf(name, sizeof name, "%s.%ld", kind, pid);
  path_of(name, path);
  snprintf(beside, sizeof beside, "%s.new%d", path, getpid());
  FILE *file = fopen(beside, "w");
  if (!file) return;
  fputs(text, file);
  fclose(file);
  rename(beside, path);
}

static void set_state(long pid, int state) {
  char text[16];
  snprintf(text, sizeof text, "%d", state);
  put("state", pid, text);
}

/* NCCL's peers: while one is locked nothing can be asked of another (NVIDIA/cuda-checkpoint#30). */
static int a_peer_is_locked(long pid) {
  char line[1024];
  long other;
  int entangled = 0, locked = 0;
  FILE *file = open_in_folder("scenario", "r");
  while (file && fgets(line, sizeof line, file)) {
    if (sscanf(line, "entangled %ld", &other) != 1) continue;
    if (other == pid) entangled = 1;
    else if (state_of(other) == LOCKED || state_of(other) == CHECKPOINTED) locked = 1;
  }
  if (file) fclose(file);
  return entangled && locked;
}

/* Whether a process descends from this one: Yama's `ptrace_scope` 1 lets no other be touched without a right. */
static int descends(long pid) {
  while (pid > 1 && pid != getpid()) {
    char path[64];
    long parent = 0;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file || fscanf(file, "%*d (%*[^)]) %*c %ld", &parent) != 1) parent = 0;
    if (file) fclose(file);
    pid = parent;
  }
  return pid == getpid();
}

/* Make a call about a process, which goes from one state to another; -1: any, and stays. */
static int act(const char *function, int pid, int before, int after) {
  char once[128];
  note(function, pid);
  int code = obey(function, pid);
  if (code) return code;
  if (flag("descendants-only") && !descends(pid)) return OPERATING_SYSTEM;
  while (a_peer_is_locked(pid)) usleep(10000);
  if (state_of(pid) < 0 && flag("all-use-cuda")) set_state(pid, RUNNING);
  int state = state_of(pid);
  if (state < 0) return INVALID_VALUE;
  if (before >= 0 && state != before) return ILLEGAL_STATE;
  if (after >= 0) set_state(pid, after);
  if (flag("real") && before == RUNNING) kill(pid, SIGSTOP); /* a real one waits in its next call of CUDA */
  if (flag("real") && after == RUNNING) kill(pid, SIGCONT);
  snprintf(once, sizeof once, "died-after-%s", function);
  FILE *file = fault("crash-after", function, pid) >= 0 ? open_in_folder(once, "wx") : NULL;
  if (file) fclose(file), kill(getpid(), SIGSEGV);
  return 0;
}

int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) { *tid = pid + 1; return act(__func__, pid, -1, -1); }
int cuCheckpointProcessGetState(int pid, int *state) {
  int code = act(__func__, pid, -1, -1);
  *state = state_of(pid);
  return code;
}
int cuCheckpointProcessLock(int pid, LockArgs *args) {
  if (!args || !args->timeout_ms) return INVALID_VALUE; /* no timeout would mean for ever */
  return act(__func__, pid, RUNNING, LOCKED);
}
int cuCheckpointProcessCheckpoint(int pid, void *args) { (void)args; return act(__func__, pid, LOCKED, CHECKPOINTED); }
int cuCheckpointProcessUnlock(int pid, void *args) { (void)args; return act(__func__, pid, LOCKED, RUNNING); }

static int initialised = 0;

int cuCheckpointProcessRestore(int pid, RestoreArgs *args) {
  char name[64];
  if (!initialised && !flag("persistence")) return 3; /* cuda.h: persistence mode, or cuInit in the caller */
  snprintf(name, sizeof name, "bricked.%d", pid);
  FILE *file = open_in_folder(name, "r");
  if (file) { /* a restore that met too little memory is for ever (NVIDIA/cuda-checkpoint#44) */
    fclose(file);
    note(__func__, pid);
    return OPERATING_SYSTEM;
  }
  if (flag("full")) {
    put("bricked", pid, "");
    note(__func__, pid);
    return OUT_OF_MEMORY;
  }
  if (args && args->count && (file = open_in_folder("maps", "a"))) {
    for (unsigned i = 0; i < args->count; i++) {
      for (int b = 0; b < 16; b++) fprintf(file, "%02x", args->pairs[i].old.bytes[b]);
      fputc('>', file);
      for (int b = 0; b < 16; b++) fprintf(file, "%02x", args->pairs[i].now.bytes[b]);
      fputc(' ', file);
    }
    fputc('\n', file);
    fclose(file);
  }
  return act(__func__, pid, CHECKPOINTED, LOCKED);
}

/* --- what the process of a probe calls ---------------------------------------------------------------------------- */

int cuInit(unsigned flags) { (void)flags; note(__func__, 0); initialised = 1; return obey(__func__, -1); }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return obey(__func__, ordinal); }
int cuDevicePrimaryCtxRetain(void **context, int device) {
  const char *shown = getenv("CUDA_VISIBLE_DEVICES");
  *context = (void *)(long)(device + 1);
  put("on", getpid(), shown ? shown : "*");
  set_state(getpid(), RUNNING);
  return obey(__func__, device);
}
int cuCtxSetCurrent(void *context) { (void)context; return 0; }
int cuMemAlloc_v2(void **pointer, size_t size) { *pointer = calloc(1, size); return obey(__func__, -1); }
int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) { memcpy(to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) {
  if (flag("corrupt")) memset(to, 0, size);
  else memcpy(to, from, size);
  return 0;
}

/* --- how cuda-bindings finds them --------------------------------------------------------------------------------- */

int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long long flags, int *status);
static const struct { const char *name; void *function; } TABLE[] = {
#define ENTRY(name) {#name, (void *)name}
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGet), ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuCtxSetCurrent),
    {"cuMemAlloc", (void *)cuMemAlloc_v2}, {"cuMemcpyHtoD", (void *)cuMemcpyHtoD_v2}, {"cuMemcpyDtoH", (void *)cuMemcpyDtoH_v2},
    ENTRY(cuCheckpointProcessGetRestoreThreadId), ENTRY(cuCheckpointProcessGetState), ENTRY(cuCheckpointProcessLock),
    ENTRY(cuCheckpointProcessCheckpoint), ENTRY(cuCheckpointProcessRestore), ENTRY(cuCheckpointProcessUnlock),
    {"cuGetProcAddress", (void *)cuGetProcAddress_v2}};

int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long long flags, int *status) {
  (void)version, (void)flags;
  *function = NULL;
  for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++)
    if (!strcmp(TABLE[i].name, symbol)) *function = TABLE[i].function;
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : NOT_FOUND;
}

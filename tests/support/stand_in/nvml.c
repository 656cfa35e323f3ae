/* A stand-in for libnvidia-ml.so.1 that plays a scenario (scenario.h), for the real nvidia-ml-py. Structs and codes: nvml.h. */
#include <dirent.h>
#include <pthread.h>
#include <time.h>
#include "scenario.h"

#define GPUS 64
#define LOST 15
#define ALL -1L

typedef struct { char uuid[96], bus[32], name[96]; long total, reserved, used, nvlinks, recovery, lost, mig, mode, gpm, util;
                 unsigned long long cores; double gpm_s, gpm_work, gpm_warps, gpm_dram; } Gpu;
typedef struct { int index, opened; } Handle;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } ProcessInfo;
typedef struct { ProcessInfo told; unsigned long long protected; } LargeProcessInfo; /* of 535.43 to 535.86 */
typedef struct { long offset; unsigned long long gpus; } EventSet;
typedef struct { double s, work, warps, dram; } Sample;
typedef struct { unsigned id; int code; double value; const char *names[3]; } Metric;
typedef struct { unsigned version, count; Sample *one, *other; Metric metrics[]; } Metrics;
typedef struct { char old[16]; unsigned numbers[5]; char bus[32]; } PciInfo;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
typedef struct { Handle *device; unsigned long long type, data; unsigned gi, ci; } Event;
typedef struct { unsigned id, scope; long long at, late; int type, code; union { double d; unsigned u; } value; } Field;

static Handle handles[GPUS];
static int gone[GPUS]; /* seen lost by this process, until it opens the library afresh */
static int opened = 0, live = 0, samples = 0, erred = 0;

static int gpus(Gpu *found, int most) {
  char line[2048];
  int count = 0;
  FILE *file = open_in_folder("scenario", "r");
  while (file && count < most && fgets(line, sizeof line, file)) {
    if (strncmp(line, "gpu ", 4)) continue;
    Gpu *gpu = &found[count++];
    memset(gpu, 0, sizeof *gpu);
    char *rest = NULL;
    for (char *word = strtok_r(line + 4, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest)) {
      char *value = strchr(word, '=');
      if (!value) continue;
      *value++ = 0;
      if (!strcmp(word, "uuid")) snprintf(gpu->uuid, sizeof gpu->uuid, "%s", value);
      if (!strcmp(word, "bus")) snprintf(gpu->bus, sizeof gpu->bus, "%s", value);
      if (!strcmp(word, "name")) {
        snprintf(gpu->name, sizeof gpu->name, "%s", value);
        for (char *at = gpu->name; *at; at++) if (*at == '_') *at = ' ';
      }
      if (!strcmp(word, "cores")) gpu->cores = strtoull(value, NULL, 16);
      if (!strcmp(word, "gpm_s")) gpu->gpm_s = atof(value);
      if (!strcmp(word, "gpm_work")) gpu->gpm_work = atof(value);
      if (!strcmp(word, "gpm_warps")) gpu->gpm_warps = atof(value);
      if (!strcmp(word, "gpm_dram")) gpu->gpm_dram = atof(value);
#define NUMBER(key) if (!strcmp(word, #key)) gpu->key = atol(value)
      NUMBER(total); NUMBER(reserved); NUMBER(used); NUMBER(nvlinks); NUMBER(recovery); NUMBER(lost); NUMBER(mig);
      NUMBER(mode); NUMBER(gpm); NUMBER(util);
    }
  }
  if (file) fclose(file);
  return count;
}

/* The driver's version, from a line `driver 535.54.03` of the scenario, as a number to compare: 535054. Before R510 a
 * driver had no memory with its reserve and no third form of its lists, before R520 no GPM; the third form had a larger
 * struct from 535.43 to 535.86 and was not there in 535.98 (XuehaiPan/nvitop#89 and #94, by nvidia-settings). */
static int driver(char text[32]) {
  char line[1024];
  int major = 0, minor = 0;
  strcpy(text, "580.95.05");
  FILE *file = open_in_folder("scenario", "r");
  while (file && fgets(line, sizeof line, file)) sscanf(line, "driver %31s", text);
  if (file) fclose(file);
  sscanf(text, "%d.%d", &major, &minor);
  return major * 1000 + minor;
}
#define ABSENT 13
/* Return the error of a function that this driver has not got. */
#define SINCE(first) do { char text[32]; if (driver(text) < (first)) return ABSENT; } while (0)

/* Begin a call about a GPU: read it, and return the error that the scenario has for it. */
static int begin(const char *function, Handle *handle, Gpu *gpu) {
  Gpu all[GPUS];
  if (!live) return 1;
  if (!handle || handle->opened != opened) return 2; /* a handle of a library that was shut down since */
  if (handle->index >= gpus(all, GPUS)) return 28;
  *gpu = all[handle->index];
  int code = obey(function, handle->index);
  erred += code != 0;
  if (gpu->lost) gone[handle->index] = 1;
  return gone[handle->index] ? LOST : code;
}
#define BEGIN(handle) Gpu gpu; int code = begin(__func__, handle, &gpu); if (code) return code

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  Gpu all[GPUS];
  int code = gpus(all, 1) || flag("no-gpu") ? obey(__func__, ALL) : 12;
  if (code) return code;
  opened++, live = 1;
  memset(gone, 0, sizeof gone);
  return 0;
}
int nvmlShutdown(void) {
  int code = live ? obey(__func__, ALL) : 1;
  live = 0;
  return code;
}
const char *nvmlErrorString(int code) { (void)code; return "an error of the stand-in"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  char version[32];
  driver(version);
  snprintf(text, size, "%s", version);
  return obey(__func__, ALL);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  Gpu all[GPUS];
  int code = live ? obey(__func__, ALL) : 1;
  *count = code ? 0 : (unsigned)gpus(all, GPUS);
  return code;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle **handle) {
  Gpu all[GPUS];
  if ((int)index >= gpus(all, GPUS)) return 2;
  int code = obey(__func__, index);
  if (all[index].lost) gone[index] = 1;
  if (code || gone[index]) return code ? code : LOST;
  handles[index].index = (int)index, handles[index].opened = opened;
  *handle = &handles[index];
  return 0;
}
int nvmlDeviceGetUUID(Handle *handle, char *text, unsigned size) { BEGIN(handle); snprintf(text, size, "%s", gpu.uuid); return 0; }
int nvmlDeviceGetName(Handle *handle, char *text, unsigned size) { BEGIN(handle); snprintf(text, size, "%s", gpu.name); return 0; }
int nvmlDeviceGetPciInfo_v3(Handle *handle, PciInfo *info) {
  BEGIN(handle);
  memset(info, 0, sizeof *info);
  snprintf(info->bus, sizeof info->bus, "%s", gpu.bus);
  return 0;
}
int nvmlDeviceGetCpuAffinity(Handle *handle, unsigned words, unsigned long *mask) {
  BEGIN(handle);
  memset(mask, 0, words * sizeof *mask);
  mask[0] = gpu.cores;
  return 0;
}
int nvmlDeviceGetMigMode(Handle *handle, unsigned *now, unsigned *next) {
  BEGIN(handle);
  *now = *next = gpu.mig == 1;
  return gpu.mig < 0 ? 3 : 0;
}
int nvmlDeviceGetComputeMode(Handle *handle, unsigned *mode) { BEGIN(handle); *mode = (unsigned)gpu.mode; return 0; }
int nvmlDeviceGetPersistenceMode(Handle *handle, unsigned *mode) { BEGIN(handle); *mode = flag("persistence"); return 0; }

/* --- processes and memory: those of the scenario, or with the flag `real` those that were shown the GPU -------------- */

/* The private memory of a process if it was shown this GPU and has loaded enough to have a context; else 0. */
static unsigned long long real_bytes(long pid, const char *uuid) {
  static char environ[65536];
  char path[64];
  unsigned long resident = 0, shared = 0;
  snprintf(path, sizeof path, "/proc/%ld/environ", pid);
  FILE *file = fopen(path, "r");
  if (!file) return 0;
  size_t size = fread(environ, 1, sizeof environ - 1, file), shown = 0;
  fclose(file);
  environ[size] = 0;
  for (char *at = environ; at < environ + size; at += strlen(at) + 1)
    if (!strncmp(at, "CUDA_VISIBLE_DEVICES=", 21)) shown = strstr(at, uuid) != NULL;
  if (!shown || state_of(pid) == 2) return 0;
  snprintf(path, sizeof path, "/proc/%ld/statm", pid);
  if (!(file = fopen(path, "r"))) return 0;
  if (fscanf(file, "%*u %lu %lu", &resident, &shared) != 2) resident = shared = 0;
  fclose(file);
  unsigned long long bytes = (resident - shared) * (unsigned long long)sysconf(_SC_PAGESIZE);
  return bytes > 128 * MIB ? bytes : 0;
}

/* The processor time (s) of the processes that `real_bytes` counts: with the flag `gpm-counts`, what GPM's counters count. */
static double real_work(const char *uuid) {
  DIR *proc = opendir("/proc");
  double sum = 0;
  for (struct dirent *entry; proc && (entry = readdir(proc));) {
    char path[300], line[1024];
    unsigned long user = 0, system = 0;
    long pid = atol(entry->d_name);
    if (!pid || !real_bytes(pid, uuid)) continue;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    FILE *file = fopen(path, "r");
    char *rest = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    if (rest) sscanf(rest, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system);
    if (file) fclose(file);
    sum += (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
  }
  if (proc) closedir(proc);
  return sum;
}

static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;

static unsigned processes(int index, const char *uuid, const char *kind, ProcessInfo *found, unsigned most) {
  char line[1024], told[32];
  unsigned count = 0;
  int at;
  long pid, mib;
  FILE *file = open_in_folder("scenario", "r");
  while (file && fgets(line, sizeof line, file)) {
    if (sscanf(line, "process %d %ld %ld %31s", &at, &pid, &mib, told) != 4 || at != index || strcmp(told, kind)) continue;
    if (state_of(pid) == 2 && !flag("stays")) continue;
    if (count < most) found[count] = (ProcessInfo){(unsigned)pid, mib < 0 ? ~0ULL : (unsigned long long)mib * MIB, ~0U, ~0U};
    count++;
  }
  if (file) fclose(file);
  DIR *proc = !strcmp(kind, "compute") && flag("real") ? opendir("/proc") : NULL;
  for (struct dirent *entry; proc && (entry = readdir(proc));) {
    unsigned long long bytes = (pid = atol(entry->d_name)) ? real_bytes(pid, uuid) : 0;
    if (!bytes) continue;
    if (count < most) found[count] = (ProcessInfo){(unsigned)pid, bytes, ~0U, ~0U};
    count++;
  }
  if (proc) closedir(proc);
  char here[4096];
  path_of("", here);
  const char *prefix = !strcmp(kind, "mps") ? "mps" : "on"; /* clients of the played MPS; those that called CUDA themselves */
  proc = strcmp(kind, "graphics") && !flag("blind") ? opendir(here) : NULL;
  for (struct dirent *entry; proc && (entry = readdir(proc));) {
    char name[64];
    size_t length = strlen(prefix);
    if (strncmp(entry->d_name, prefix, length) || sscanf(entry->d_name + length, ".%ld", &pid) != 1 || kill((pid_t)pid, 0)) continue;
    snprintf(name, sizeof name, "%s.%ld", prefix, pid);
    FILE *on = open_in_folder(name, "r");
    int here = on && fscanf(on, "%63s", name) == 1 && strstr(name, uuid);
    if (on) fclose(on);
    if (!here || (state_of(pid) == 2 && !flag("stays"))) continue;
    if (count < most) found[count] = (ProcessInfo){(unsigned)pid, 300 * MIB, ~0U, ~0U};
    count++;
  }
  if (proc) closedir(proc);
  return count;
}

static int list(const char *function, Handle *handle, const char *kind, unsigned *count, ProcessInfo *infos) {
  Gpu gpu;
  int code = begin(function, handle, &gpu);
  if (code) return code;
  pthread_mutex_lock(&one);
  unsigned there = processes(handle->index, gpu.uuid, kind, infos, infos ? *count : 0), room = infos ? *count : 0;
  pthread_mutex_unlock(&one);
  *count = there;
  return there > room ? 7 : 0;
}
/* The third form of a list. */
static int list_v3(const char *function, Handle *handle, const char *kind, unsigned *count, ProcessInfo *infos) {
  char text[32];
  int version = driver(text);
  if (version < 510000 || (version >= 535098 && version < 535104)) return ABSENT;
  int code = list(function, handle, kind, count, infos);
  LargeProcessInfo *large = (LargeProcessInfo *)infos;
  if (code || !infos || version < 535043 || version >= 535098) return code;
  for (unsigned i = *count; i-- > 0;) {
    ProcessInfo told = infos[i];
    large[i].told = told, large[i].protected = 0;
  }
  return code;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Handle *h, unsigned *n, ProcessInfo *p) { return list_v3(__func__, h, "compute", n, p); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(Handle *h, unsigned *n, ProcessInfo *p) { return list_v3(__func__, h, "mps", n, p); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle *h, unsigned *n, ProcessInfo *p) { return list_v3(__func__, h, "graphics", n, p); }
#define SECOND_FORM(kind, name) \
  int nvmlDeviceGet##kind##RunningProcesses_v2(Handle *h, unsigned *n, ProcessInfo *p) { SINCE(450000); return list(__func__, h, name, n, p); }
SECOND_FORM(Compute, "compute")
SECOND_FORM(MPSCompute, "mps")
SECOND_FORM(Graphics, "graphics")

/* The memory in use without the driver's reserve. */
static unsigned long long used(Handle *handle, Gpu *gpu) {
  ProcessInfo found[256];
  unsigned long long sum = (unsigned long long)gpu->used * MIB;
  if (!flag("real")) return sum;
  pthread_mutex_lock(&one);
  for (int list = 0; list < 2; list++) {
    unsigned count = processes(handle->index, gpu->uuid, list ? "mps" : "compute", found, 256);
    for (unsigned i = 0; i < count && i < 256; i++) sum += found[i].used;
  }
  pthread_mutex_unlock(&one);
  return sum;
}
int nvmlDeviceGetMemoryInfo(Handle *handle, unsigned long long *info) {
  BEGIN(handle);
  unsigned long long in_use = used(handle, &gpu) + (unsigned long long)gpu.reserved * MIB, total = (unsigned long long)gpu.total * MIB;
  info[0] = total, info[1] = total - in_use, info[2] = in_use;
  return 0;
}
/* Drivers differ in whether `used` counts the reserve (nvml-wrapper #57); nvml.h can be read either way. */
int nvmlDeviceGetMemoryInfo_v2(Handle *handle, Memory *info) {
  SINCE(510000);
  BEGIN(handle);
  if (info->version != 0x2000028) return 25;
  info->total = (unsigned long long)gpu.total * MIB, info->reserved = (unsigned long long)gpu.reserved * MIB;
  unsigned long long in_use = used(handle, &gpu);
  info->free = info->total - info->reserved - in_use;
  info->used = in_use + (flag("used-counts-reserved") ? info->reserved : 0);
  return 0;
}

/* --- activity, links, events ------------------------------------------------------------------------------------- */

int nvmlDeviceGetUtilizationRates(Handle *handle, unsigned *rates) { BEGIN(handle); rates[0] = (unsigned)gpu.util; rates[1] = 0; return 0; }
int nvmlGpmQueryDeviceSupport(Handle *handle, unsigned *support) {
  SINCE(520000);
  BEGIN(handle);
  if (support[0] != 1) return 25;
  support[1] = (unsigned)gpu.gpm;
  return 0;
}
int nvmlGpmSampleAlloc(Sample **sample) { *sample = calloc(1, sizeof **sample); samples++; return obey(__func__, ALL); }
int nvmlGpmSampleFree(Sample *sample) { free(sample); samples--; return 0; }
int times_opened(void) { return opened; }
/* How many calls about a GPU were given an error that the scenario has for them. */
int times_erred(void) { return erred; }
int samples_held(void) { return samples; }
int nvmlGpmSampleGet(Handle *handle, Sample *sample) {
  BEGIN(handle);
  *sample = (Sample){gpu.gpm_s, gpu.gpm_work, gpu.gpm_warps, gpu.gpm_dram};
  if (!flag("gpm-counts")) return 0;
  struct timespec now;
  pthread_mutex_lock(&one);
  double percent = 100 * real_work(gpu.uuid);
  pthread_mutex_unlock(&one);
  clock_gettime(CLOCK_MONOTONIC, &now);
  *sample = (Sample){(double)now.tv_sec + (double)now.tv_nsec / 1e9, percent, percent, percent};
  return 0;
}
int nvmlGpmMetricsGet(Metrics *asked) {
  int code = obey(__func__, ALL);
  if (code) return code;
  if (asked->version != 1) return 25;
  double elapsed_s = asked->other->s - asked->one->s;
  for (unsigned i = 0; i < asked->count; i++) {
    asked->metrics[i].code = elapsed_s > 0.1 ? 0 : 2; /* nvml.h: more than 100 ms apart */
    unsigned id = asked->metrics[i].id;
    const Sample *a = asked->one, *b = asked->other;
    double done = id == 2 ? b->work - a->work : id == 3 ? b->warps - a->warps : id == 10 ? b->dram - a->dram : 0;
    asked->metrics[i].value = elapsed_s > 0 ? done / elapsed_s : 0;
  }
  return 0;
}

int nvmlDeviceGetNvLinkState(Handle *handle, unsigned link, unsigned *up) {
  BEGIN(handle);
  if (!gpu.nvlinks) return 3;
  *up = (long)link < gpu.nvlinks;
  return link < 18 ? 0 : 2;
}
int nvmlDeviceGetP2PStatus(Handle *handle, Handle *other, unsigned which, unsigned *status) {
  BEGIN(handle);
  Gpu second;
  if ((code = begin(__func__, other, &second))) return code;
  *status = which == 2 && gpu.nvlinks && second.nvlinks ? 0 : 5;
  return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(Handle *handle, Handle *other, unsigned *level) {
  BEGIN(handle);
  char line[256];
  int a, b, found;
  *level = 50;
  FILE *file = open_in_folder("scenario", "r");
  while (file && fgets(line, sizeof line, file))
    if (sscanf(line, "link %d %d %d", &a, &b, &found) == 3 &&
        ((a == handle->index && b == other->index) || (b == handle->index && a == other->index))) *level = (unsigned)found;
  if (file) fclose(file);
  return 0;
}

int nvmlEventSetCreate(EventSet **set) {
  int code = obey(__func__, ALL);
  if (code) return code;
  *set = calloc(1, sizeof **set);
  FILE *file = open_in_folder("events", "r");
  if (file) fseek(file, 0, SEEK_END), (*set)->offset = ftell(file), fclose(file);
  return 0;
}
int nvmlEventSetFree(EventSet *set) { free(set); return 0; }
int nvmlDeviceGetSupportedEventTypes(Handle *handle, unsigned long long *types) { BEGIN(handle); *types = 0xFFFF; return 0; }
int nvmlDeviceRegisterEvents(Handle *handle, unsigned long long types, EventSet *set) {
  BEGIN(handle);
  if (types & 0x8) set->gpus |= 1ULL << handle->index;
  return 0;
}
int nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned ms) {
  (void)ms;
  int code = obey(__func__, ALL), index;
  unsigned long long type, data;
  if (code) return code;
  FILE *file = open_in_folder("events", "r");
  if (!file) return 10;
  fseek(file, set->offset, SEEK_SET);
  code = 10;
  while (code && fscanf(file, "%d %llx %llu\n", &index, &type, &data) == 3) {
    set->offset = ftell(file);
    if (!(set->gpus >> index & 1)) continue;
    event->device = &handles[index], event->type = type, event->data = data, event->gi = event->ci = ~0U;
    code = 0;
  }
  fclose(file);
  return code;
}
int nvmlDeviceGetFieldValues(Handle *handle, int count, Field *values) {
  BEGIN(handle);
  for (int i = 0; i < count; i++) {
    values[i].code = values[i].id != 230 ? 3 : gpu.recovery >= 0 ? 0 : gpu.recovery == -1 ? 3 : (int)-gpu.recovery;
    values[i].value.u = (unsigned)gpu.recovery;
  }
  return 0;
}

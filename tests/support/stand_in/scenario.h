/* What both stand-in libraries read: the file `scenario` beside them, afresh at each call.
 *
 * A line is `driver VERSION`, `gpu key=value ...`, `process GPU PID MIB compute|mps|graphics`, `link GPU GPU LEVEL`, a
 * flag (one word), or a fault: `error|hang|crash|delay FUNCTION WHICH VALUE`, where WHICH is a GPU's number, a process's,
 * or `*`. */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <signal.h>

#define MIB (1024ULL * 1024ULL)

/* Write the path of a file in the folder of this library. */
static void path_of(const char *name, char path[4096]) {
  Dl_info here;
  dladdr((void *)path_of, &here);
  snprintf(path, 4096, "%s", here.dli_fname);
  char *last = strrchr(path, '/');
  snprintf(last ? last + 1 : path, 1024, "%s", name);
}

static FILE *open_in_folder(const char *name, const char *mode) {
  char path[4096];
  path_of(name, path);
  return fopen(path, mode);
}

/* Whether the scenario has this line, which is a flag. */
static int flag(const char *word) {
  char line[1024];
  int found = 0;
  FILE *file = open_in_folder("scenario", "r");
  while (file && !found && fgets(line, sizeof line, file)) {
    line[strcspn(line, "\n")] = 0;
    found = !strcmp(line, word);
  }
  if (file) fclose(file);
  return found;
}

/* The value of a fault of this kind for this function and GPU or process; -1 without one. */
static long fault(const char *kind, const char *function, long which) {
  char line[1024], a[64], b[128], c[64];
  long value = -1, told = 0;
  FILE *file = open_in_folder("scenario", "r");
  while (file && value < 0 && fgets(line, sizeof line, file)) {
    told = 0;
    if (sscanf(line, "%63s %127s %63s %ld", a, b, c, &told) < 3 || strcmp(a, kind)) continue;
    if ((!strcmp(b, "*") || !strcmp(b, function)) && (!strcmp(c, "*") || atol(c) == which)) value = told;
  }
  if (file) fclose(file);
  return value;
}

/* Obey the faults of a call: wait, die or hang for as long as the scenario says so; return its error code, or 0. */
static int obey(const char *function, long which) {
  long value = fault("delay", function, which);
  if (value > 0) usleep((useconds_t)value * 1000);
  if (fault("crash", function, which) >= 0) kill(getpid(), SIGSEGV);
  while (fault("hang", function, which) >= 0) usleep(10000);
  value = fault("error", function, which);
  return value > 0 ? (int)value : 0;
}

/* The driver's state of a process, from the file `state.PID`; -1 for one without CUDA. */
static int state_of(long pid) {
  char name[64];
  int state = -1;
  snprintf(name, sizeof name, "state.%ld", pid);
  FILE *file = open_in_folder(name, "r");
  if (!file) return -1;
  if (fscanf(file, "%d", &state) != 1) state = -1;
  fclose(file);
  return state;
}

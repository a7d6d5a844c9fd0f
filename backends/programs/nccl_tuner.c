/* A tuner plugin for NCCL and RCCL: which algorithm, protocol and number of channels serve which sizes, by a file.
 *
 * NCCL_TUNER_PLUGIN names this library, NCCL_TUNER_CONFIG_FILE the file, a row of which is
 *
 *     collective,least bytes,most bytes,algorithm,protocol,channels,hosts,ranks[,operations[,registered]]
 *
 * with 0 or -1 for "NCCL's own number" of channels and -1 for "any" in what follows them. The first row that fits
 * a call and names what NCCL can do there is taken; where there is none, its costs and channels stay as they are.
 * A file that cannot be read, or has a row that says nothing, ends the making of the communicator with one line.
 *
 * Declared here is what the interface documents of its versions 3 to 6; nothing of NCCL is included.
 */
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DONE = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5 };           /* ncclResult_t */
enum { WARN = 2, INFO = 3 };                                      /* levels of the log */
enum { TUNING = 0x40 };                                           /* its part for tuners */
enum { LEAST_FIELDS = 8, MOST_FIELDS = 10, LINE = 512, SAID = 256 };
enum { ANY = -1, MOST_CHANNELS = 64 };

typedef void (*Log)(int level, unsigned long part, const char *file, int line, const char *format, ...);

static const char *const COLLECTIVES[] = {"broadcast", "reduce", "allgather", "reducescatter", "allreduce", NULL};
static const char *const ALGORITHMS[] = {"tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat", NULL};
static const char *const PROTOCOLS[] = {"ll", "ll128", "simple", NULL};

typedef struct {
    int collective, algorithm, protocol, channels, operations, registered;
    uint64_t least, most;
} Row;

typedef struct {
    size_t count;
    Row rows[];
} Table;

static void say(Log log, int level, const char *format, ...) {
    char said[SAID];
    va_list given;
    if (log == NULL) return;
    va_start(given, format);
    vsnprintf(said, sizeof said, format, given);
    va_end(given);
    log(level, TUNING, __FILE__, __LINE__, "TUNER/arborcast: %s", said);
}

/* Where a word stands in a list; -1 where it does not. */
static int place(const char *word, const char *const *words) {
    for (int at = 0; words[at] != NULL; at++)
        if (strcmp(word, words[at]) == 0) return at;
    return -1;
}

/* A whole number from `least` on; returns whether it is one. */
static int number(const char *word, long long least, long long most, long long *value) {
    char *end = NULL;
    errno = 0;
    *value = strtoll(word, &end, 10);
    return *word != 0 && *end == 0 && errno == 0 && *value >= least && *value <= most;
}

/* Cut a line at its commas, without the blanks around; returns how many fields there are. */
static int cut(char *line, char *fields[MOST_FIELDS + 1]) {
    int count = 0;
    while (count <= MOST_FIELDS) {
        char *next = strchr(line, ',');
        if (next != NULL) *next = 0;
        while (isspace((unsigned char)*line)) line++;
        for (char *end = line + strlen(line); end > line && isspace((unsigned char)end[-1]);) *--end = 0;
        fields[count++] = line;
        if (next == NULL) break;
        line = next + 1;
    }
    return count;
}

/* What a row says, and for how many hosts and ranks; returns the rule that it breaks, or NULL. */
static const char *parse(char *line, Row *row, long long *hosts, long long *ranks) {
    char *fields[MOST_FIELDS + 1];
    int count = cut(line, fields);
    long long least, most, channels, operations = ANY, registered = ANY;
    if (count < LEAST_FIELDS || count > MOST_FIELDS) return "must have 8 to 10 fields";
    if ((row->collective = place(fields[0], COLLECTIVES)) < 0)
        return "field 1 must be broadcast, reduce, allgather, reducescatter or allreduce";
    if (!number(fields[1], 0, INT64_MAX, &least)) return "field 2, the least bytes, must be a whole number";
    if (!number(fields[2], least, INT64_MAX, &most)) return "field 3, the most bytes, must be a whole number, not below the least";
    if ((row->algorithm = place(fields[3], ALGORITHMS)) < 0)
        return "field 4 must be tree, ring, collnet_direct, collnet_chain, nvls, nvls_tree or pat";
    if ((row->protocol = place(fields[4], PROTOCOLS)) < 0) return "field 5 must be ll, ll128 or simple";
    if (!number(fields[5], ANY, MOST_CHANNELS, &channels)) return "field 6, channels, must be a number to 64, 0 or -1 for NCCL's own";
    if (!number(fields[6], ANY, INT32_MAX, hosts)) return "field 7, hosts, must be a whole number, -1 for any";
    if (!number(fields[7], ANY, INT32_MAX, ranks)) return "field 8, ranks, must be a whole number, -1 for any";
    if (count > 8 && !number(fields[8], ANY, INT32_MAX, &operations)) return "field 9, operations, must be a whole number, -1 for any";
    if (count > 9 && !number(fields[9], ANY, 1, &registered)) return "field 10, registered, must be 0, 1, or -1 for any";
    row->least = (uint64_t)least;
    row->most = (uint64_t)most;
    row->channels = (int)channels;
    row->operations = (int)operations;
    row->registered = (int)registered;
    return NULL;
}

static int load(size_t ranks, size_t hosts, Log log, void **context) {
    const char *name = getenv("NCCL_TUNER_CONFIG_FILE");
    char line[LINE];
    size_t room = 0;
    int at = 0, status = DONE;
    Table *table = calloc(1, sizeof *table);
    FILE *file = name == NULL ? NULL : fopen(name, "r");
    if (table == NULL || file == NULL) {
        say(log, WARN, "NCCL_TUNER_CONFIG_FILE: %s", name == NULL ? "must name a file" : strerror(errno));
        free(table);
        if (file != NULL) fclose(file);
        return name == NULL ? INVALID_USAGE : SYSTEM_ERROR;
    }
    while (status == DONE && fgets(line, sizeof line, file) != NULL) {
        const char *rule = NULL;
        long long for_hosts = ANY, for_ranks = ANY;
        Row row = {0};
        at++;
        line[strcspn(line, "\r\n")] = 0;
        if (strlen(line) == sizeof line - 1) rule = "must be shorter than 511 characters";
        else if (line[0] == '#' || line[strspn(line, " \t")] == 0) continue;
        else rule = parse(line, &row, &for_hosts, &for_ranks);
        if (rule != NULL) {
            say(log, WARN, "%s:%d: %s", name, at, rule);
            status = INVALID_USAGE;
        } else if ((for_hosts == ANY || (size_t)for_hosts == hosts) && (for_ranks == ANY || (size_t)for_ranks == ranks)) {
            if (table->count == room) {
                Table *larger = realloc(table, sizeof *table + (room = 2 * room + 16) * sizeof *table->rows);
                if (larger == NULL) {
                    status = SYSTEM_ERROR;
                    break;
                }
                table = larger;
            }
            table->rows[table->count++] = row;
        }
    }
    fclose(file);
    if (status != DONE) {
        free(table);
        return status;
    }
    say(log, INFO, "%zu rows of %s are for %zu ranks on %zu hosts", table->count, name, ranks, hosts);
    *context = table;
    return DONE;
}

static int unload(void *context) {
    free(context);
    return DONE;
}

/* The costs lie row by row, whatever their type says; those below zero cannot be chosen. */
static int choose(void *context, int collective, size_t bytes, int operations, float **costs, int algorithms, int protocols,
                  int registered, int *channels) {
    const Table *table = context;
    for (const Row *row = table->rows; row < table->rows + table->count; row++) {
        if (row->collective != collective || bytes < row->least || bytes > row->most) continue;
        if (row->operations != ANY && row->operations != operations) continue;
        if (row->registered != ANY && registered != ANY && row->registered != registered) continue;
        if (row->algorithm >= algorithms || row->protocol >= protocols) continue;
        float *cost = (float *)costs + row->algorithm * protocols + row->protocol;
        if (*cost < 0) continue;
        *cost = 0;
        if (row->channels > 0) *channels = row->channels;
        break;
    }
    return DONE;
}

/* Version 3 does not say whether buffers are registered: rows for either fit. */
static int choose_v3(void *context, int collective, size_t bytes, int operations, float **costs, int algorithms, int protocols,
                     int *channels) {
    return choose(context, collective, bytes, operations, costs, algorithms, protocols, ANY, channels);
}

static int load_v5(void **context, uint64_t communicator, size_t ranks, size_t hosts, Log log, void *domains, void *constants) {
    (void)communicator, (void)domains, (void)constants;
    return load(ranks, hosts, log, context);
}

typedef struct {
    const char *name;
    int (*init)(size_t, size_t, Log, void **);
    int (*choose)(void *, int, size_t, int, float **, int, int, int *);
    int (*destroy)(void *);
} Version3;

typedef struct {
    const char *name;
    int (*init)(size_t, size_t, Log, void **);
    int (*choose)(void *, int, size_t, int, float **, int, int, int, int *);
    int (*destroy)(void *);
} Version4;

typedef struct {
    const char *name;
    int (*init)(void **, uint64_t, size_t, size_t, Log, void *, void *);
    int (*choose)(void *, int, size_t, int, float **, int, int, int, int *);
    int (*finalize)(void *);
} Version5;

typedef struct {
    Version5 first;
    int (*chunk_size)(void *, int, size_t, int, int, int, size_t *);
} Version6;

#define SHOWN __attribute__((visibility("default")))

SHOWN const Version3 ncclTunerPlugin_v3 = {"arborcast", load, choose_v3, unload};
SHOWN const Version4 ncclTunerPlugin_v4 = {"arborcast", load, choose, unload};
SHOWN const Version5 ncclTunerPlugin_v5 = {"arborcast", load_v5, choose, unload};
SHOWN const Version6 ncclTunerPlugin_v6 = {{"arborcast", load_v5, choose, unload}, NULL};

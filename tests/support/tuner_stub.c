/* Calls a tuner plugin as NCCL does, and takes what it leaves in the table of costs as NCCL would.
 *
 *     tuner_stub VERSION RANKS HOSTS < calls
 *
 * A call is "collective bytes operations registered impossible": of bit `3 * algorithm + protocol` of the last, NCCL
 * cannot do that here. Each is answered by "algorithm protocol channels"; what the plugin logs goes to stderr.
 */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { ALGORITHMS = 7, PROTOCOLS = 3 };

typedef void (*Log)(int, unsigned long, const char *, int, const char *, ...);
struct v3 { const char *name; int (*init)(size_t, size_t, Log, void **); int (*info)(void *, int, size_t, int, float **, int, int, int *); int (*end)(void *); };
struct v4 { const char *name; int (*init)(size_t, size_t, Log, void **); int (*info)(void *, int, size_t, int, float **, int, int, int, int *); int (*end)(void *); };
struct v5 { const char *name; int (*init)(void **, uint64_t, size_t, size_t, Log, void *, void *); int (*info)(void *, int, size_t, int, float **, int, int, int, int *); int (*end)(void *); int (*chunk)(void *, int, size_t, int, int, int, size_t *); };

extern const struct v3 ncclTunerPlugin_v3;
extern const struct v4 ncclTunerPlugin_v4;
extern const struct v5 ncclTunerPlugin_v5, ncclTunerPlugin_v6;

static void say(int level, unsigned long part, const char *file, int line, const char *format, ...) {
    va_list given;
    (void)part, (void)file, (void)line;
    fprintf(stderr, "%d ", level);
    va_start(given, format);
    vfprintf(stderr, format, given);
    va_end(given);
    fputc('\n', stderr);
}

int main(int count, char **words) {
    int version = count > 3 ? atoi(words[1]) : 0, collective, operations, registered;
    size_t ranks = strtoull(words[2], NULL, 10), hosts = strtoull(words[3], NULL, 10), bytes;
    unsigned impossible;
    void *context = NULL;
    const struct v5 *late = version == 5 ? &ncclTunerPlugin_v5 : &ncclTunerPlugin_v6;
    int status = version == 3   ? ncclTunerPlugin_v3.init(ranks, hosts, say, &context)
                 : version == 4 ? ncclTunerPlugin_v4.init(ranks, hosts, say, &context)
                                : late->init(&context, 7, ranks, hosts, say, NULL, NULL);
    if (status != 0) return status;
    if (version == 6 && late->chunk != NULL) return 99;
    while (scanf("%d %zu %d %d %u", &collective, &bytes, &operations, &registered, &impossible) == 5) {
        float costs[ALGORITHMS][PROTOCOLS], least = 1e30f;
        int channels = 0, algorithm = -1, protocol = -1;
        for (int a = 0; a < ALGORITHMS; a++)
            for (int p = 0; p < PROTOCOLS; p++) costs[a][p] = impossible >> (PROTOCOLS * a + p) & 1 ? -1.0f : 10.0f + a + p;
        float **flat = (float **)costs;
        status = version == 3   ? ncclTunerPlugin_v3.info(context, collective, bytes, operations, flat, ALGORITHMS, PROTOCOLS, &channels)
                 : version == 4 ? ncclTunerPlugin_v4.info(context, collective, bytes, operations, flat, ALGORITHMS, PROTOCOLS, registered, &channels)
                                : late->info(context, collective, bytes, operations, flat, ALGORITHMS, PROTOCOLS, registered, &channels);
        if (status != 0) return status;
        for (int a = 0; a < ALGORITHMS; a++)
            for (int p = 0; p < PROTOCOLS; p++)
                if (costs[a][p] >= 0 && costs[a][p] < least) least = costs[a][p], algorithm = a, protocol = p;
        printf("%d %d %d\n", algorithm, protocol, channels);
    }
    return version == 3 ? ncclTunerPlugin_v3.end(context) : version == 4 ? ncclTunerPlugin_v4.end(context) : late->end(context);
}

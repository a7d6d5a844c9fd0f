/* One collective on one rank: a graph of actions, the rank's memory, and the channels that join it to others.

   Nothing here blocks but the one sleep. What can be sent is sent as soon as it is complete; what has come is
   used at once, while it is in the cache. */

#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "native.h"

enum { MESSAGES = 64 }; /* that are handed over by one call */

static const int32_t *send_of(const struct run *r, const struct peer *p) {
    return r->graph->orders + p->first_send + p->sent;
}

static bool may_send(const struct run *r, const struct peer *p) {
    return p->sent < p->sends && r->left[*send_of(r, p)] == 0;
}

static bool may_receive(const struct run *r, const struct peer *p) {
    if (p->awaits_opening)
        return true;
    return p->received < p->receives && r->left[r->graph->orders[p->first_receive + p->received]] == 0;
}

static uint8_t *into_of(const struct run *r, const struct action *a) {
    return r->memory[a->into_buffer] + a->into * r->item_bytes;
}

static uint8_t *source_of(const struct run *r, const struct action *a) {
    return r->memory[a->source_buffer] + a->source * r->item_bytes;
}

/* Note what may start now that an action is complete. Messages that may are found by looking at the peers. */
static void run_complete(struct run *r, int32_t number) {
    const struct action *done = &r->graph->action[number];
    r->missing--;
    r->progress = 1;
    for (int32_t i = 0; i < done->waiters; i++) {
        int32_t waiter = r->graph->waiters[done->first_waiter + i];
        if (--r->left[waiter] == 0 && r->graph->action[waiter].peer < 0)
            r->local[(r->local_first + r->local_count++) % r->graph->actions] = waiter;
    }
}

static const uint8_t *opening_of(const struct run *r, int32_t number) {
    return r->openings + OPENING_BYTES * (number - 1);
}

static int32_t fail(struct run *r, const struct peer *p, int64_t trouble) {
    r->asked_peer = (int32_t)(p - r->peers);
    r->trouble = (int32_t)trouble;
    return FAILED;
}

/* Reset everything, send the openings, and let begin what waits for nothing. */
int32_t run_begin(struct run *r) {
    const struct graph *g = r->graph;
    if (g->actions > 0)
        memcpy(r->left, g->waits, sizeof *r->left * (size_t)g->actions);
    r->missing = g->actions;
    r->local_first = r->local_count = 0;
    r->moved = 0;
    for (int32_t i = 0; i < r->peer_count; i++)
        if (r->peers[i].channel->shelf != NULL) {
            r->peers[i].channel->shelf->run++; /* the same of all channels */
            break;
        }
    for (int32_t i = 0; i < g->actions; i++)
        if (g->action[i].peer < 0 && r->left[i] == 0)
            r->local[r->local_count++] = i;
    for (struct peer *p = r->peers; p < r->peers + r->peer_count; p++) {
        p->sent = p->received = p->is_gone = 0;
        p->outgoing = p->incoming = 0;
        p->awaits_opening = p->awaited > 0;
        r->missing += p->awaits_opening;
    }
    for (struct peer *p = r->peers; p < r->peers + r->peer_count; p++) {
        int32_t follows = r->local_count == 0 && may_send(r, p);
        int32_t opened = p->told ? channel_open(p->channel, opening_of(r, p->told), follows) : 0;
        if (opened < 0)
            return fail(r, p, opened);
    }
    return OVER;
}

/* Carry out a local action. */
static void compute(struct run *r, int32_t number) {
    const struct action *a = &r->graph->action[number];
    size_t bytes = (size_t)(a->length * r->item_bytes);
    if (a->act == COPY)
        memmove(into_of(r, a), source_of(r, a), bytes);
    else
        r->combine(into_of(r, a), into_of(r, a), source_of(r, a), a->length);
    run_complete(r, number);
}

/* Whether what is sent goes by the shelf: others are sent it, too, and it is long. */
static bool is_laid(const struct run *r, const struct channel *c, const struct action *a) {
    return a->share >= 0 && c->shelf != NULL && a->length * r->item_bytes >= c->shelf->least_bytes;
}

/* Hand over what may be sent to a peer, what is ready together by one call. */
static int64_t push(struct run *r, struct peer *p) {
    struct message messages[MESSAGES];
    struct channel *c = p->channel;
    int32_t count = 0, share = -1;
    const int32_t *order = send_of(r, p);
    while (count < MESSAGES && p->sent + count < p->sends && r->left[order[count]] == 0) {
        const struct action *a = &r->graph->action[order[count]];
        /* A part that has begun ends as it began. */
        bool lays = is_laid(r, c, a) && (count > 0 || c->owed == 0);
        if (lays && count > 0)
            break;
        messages[count++] = (struct message){into_of(r, a), a->length * r->item_bytes};
        share = lays ? a->share : -1;
        if (lays)
            break;
    }
    int64_t sent = share < 0 ? channel_send_all(c, messages, count, p->outgoing)
                             : channel_send_laid(c, share, p->outgoing, messages[0].data + p->outgoing,
                                                 messages[0].size - p->outgoing);
    if (sent < 0)
        return sent;
    r->progress |= sent > 0;
    p->outgoing += sent;
    for (int32_t i = 0; i < count && p->outgoing >= messages[i].size; i++) {
        p->outgoing -= messages[i].size;
        p->sent++;
        run_complete(r, order[i]);
    }
    return sent;
}

/* See the opening of a peer, which must be what is awaited. */
static int32_t see_opening(struct run *r, struct peer *p) {
    int32_t is_here = channel_opening(p->channel);
    if (is_here < 0)
        return fail(r, p, is_here);
    if (is_here == 0)
        return OVER;
    if (memcmp(p->channel->opening, opening_of(r, p->awaited), OPENING_BYTES) != 0) {
        r->asked_peer = (int32_t)(p - r->peers);
        return DIFFERS;
    }
    p->awaits_opening = 0;
    r->missing--;
    r->progress = 1;
    return OVER;
}

/* Use what has come of a peer. */
static int32_t pull(struct run *r, struct peer *p) {
    if (p->awaits_opening) {
        int32_t event = see_opening(r, p);
        if (event != OVER)
            return event;
    }
    while (!p->awaits_opening && may_receive(r, p)) {
        int32_t number = r->graph->orders[p->first_receive + p->received];
        const struct action *a = &r->graph->action[number];
        int64_t size = a->length * r->item_bytes, left = size - p->incoming, got;
        uint8_t *into = into_of(r, a) + p->incoming;
        if (a->act == COMBINE)
            got = channel_combine(p->channel, into, source_of(r, a) + p->incoming, left, r->combine,
                                  r->item_bytes);
        else
            got = channel_receive(p->channel, into, left);
        if (got < 0)
            return fail(r, p, got);
        r->progress |= got > 0;
        p->incoming += got;
        if (p->incoming < size)
            return OVER;
        p->incoming = 0;
        p->received++;
        run_complete(r, number);
    }
    return OVER;
}

/* One round of what can be done now; sends first, so that others need not wait for our reading. */
static int32_t round_of_work(struct run *r) {
    struct peer *end = r->peers + r->peer_count;
    while (r->local_count > 0) {
        int32_t number = r->local[r->local_first];
        r->local_first = (r->local_first + 1) % r->graph->actions;
        r->local_count--;
        compute(r, number);
    }
    for (struct peer *p = r->peers; p < end; p++) {
        int64_t sent = may_send(r, p) ? push(r, p) : 0;
        if (sent < 0)
            return fail(r, p, sent);
    }
    for (struct peer *p = r->peers; p < end; p++) {
        int32_t event = may_receive(r, p) ? pull(r, p) : OVER;
        if (event != OVER)
            return event;
    }
    return OVER;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Rounds of work until nothing can be done, or until then: WOKE. */
static int32_t work(struct run *r, int64_t end_ns) {
    int32_t event;
    do {
        r->progress = 0;
        event = round_of_work(r);
        r->moved |= r->progress;
        if (event == OVER && r->progress && r->steps)
            return STEPPED;
        if (event == OVER && r->progress && now_ns() >= end_ns)
            return WOKE;
    } while (event == OVER && r->progress);
    return event;
}

/* Whether all is complete here and handed over to the channels. */
static bool is_over(const struct run *r) {
    if (r->missing > 0)
        return false;
    for (const struct peer *p = r->peers; p < r->peers + r->peer_count; p++)
        if (p->channel->outbox_bytes > 0 && !p->is_gone)
            return false;
    return true;
}

/* Wait until a channel moves, somebody rings or the time is over. */
static int32_t sleep_until(struct run *r, int64_t end_ns) {
    int32_t count = r->peer_count;
    bool is_busy = false; /* there is work already: who rings or hangs up meanwhile is seen all the same */
    for (int32_t i = 0; i < count; i++) {
        struct peer *p = &r->peers[i];
        int32_t wanted = channel_wanted(p->channel, may_receive(r, p), may_send(r, p));
        if (wanted < 0) {
            int32_t looked = p->channel->outbox_bytes > 0 ? channel_look(p->channel) : 0;
            if (looked < 0)
                return fail(r, p, looked);
            is_busy = true;
            wanted = POLLIN;
        }
        wanted |= p->is_gone ? 0 : POLLRDHUP;
        r->polls[i] = (struct pollfd){wanted ? p->channel->fd : -1, (short)wanted, 0};
    }
    r->polls[count] = (struct pollfd){r->bell, POLLIN, 0};
    int64_t left_ns = end_ns - now_ns();
    /* Rounded up: a sleep that ends too early would be repeated without rest. */
    int patience_ms = is_busy || left_ns <= 0 ? 0 : (int)((left_ns + 999999) / 1000000);
    int ready = poll(r->polls, (nfds_t)count + 1, patience_ms);
    for (int32_t i = 0; i < count; i++)
        channel_awake(r->peers[i].channel);
    if (ready < 0 && errno == EINTR)
        return INTERRUPTED;
    if (ready <= 0)
        return is_busy ? WOKE : TIMED;
    for (int32_t i = 0; i < count; i++) {
        struct peer *p = &r->peers[i];
        if (r->polls[i].revents == 0)
            continue;
        /* What a peer's end lets nobody do is waited for no longer than before. */
        bool ends = r->polls[i].revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL);
        r->moved |= !ends;
        if (ends && !p->is_gone) {
            p->is_gone = 1;
            r->asked_peer = i;
            return ENDED;
        }
        int32_t looked = channel_look(p->channel);
        if (looked < 0)
            return fail(r, p, looked);
    }
    if (r->polls[count].revents) {
        uint64_t rings;
        (void)!read(r->bell, &rings, sizeof rings);
        return RUNG;
    }
    return WOKE;
}

/* Go on until there is an event for Python.

   Args: how long this may last, whatever moves meanwhile: only Python sees signals and deadlines; whether to
   sleep though all is over, and to return after that. */
int32_t run_advance(struct run *r, int32_t patience_ms, int32_t lingers) {
    int64_t end_ns = now_ns() + patience_ms * 1000000LL;
    for (;;) {
        int32_t event = work(r, end_ns);
        if (event != OVER)
            return event;
        if (is_over(r) && !lingers)
            return OVER;
        event = sleep_until(r, end_ns);
        if (event != WOKE || lingers || now_ns() >= end_ns)
            return event;
    }
}

/* What `library.py` must have, too: the sources, and the sizes in its order. */
int64_t native_sources(void) { return SOURCES; }

int64_t native_layout(int32_t which) {
    _Static_assert(SHELF_PLACES * sizeof(struct readers) <= SHELF_AT, "the counts lie before the places");
    static const int64_t sizes[] = {
        sizeof(struct channel), sizeof(struct run),   sizeof(struct peer),   sizeof(struct action),
        sizeof(struct graph),   sizeof(struct shelf), sizeof(struct moment),
    };
    return sizes[which];
}

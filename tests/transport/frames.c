/* Streams of frames, most of them wrong, against `channel.c` under sanitizers; see `test_frames.py`.

   What a reader of a stream must come to is worked out here a second time, by a parser that has all bytes at
   once (`judge`). Usage: SEED STREAMS; prints how many frames were fed, and how many streams ended how. */

#define _GNU_SOURCE
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "native.h"

enum { PLACE = 64, RING = 256, MOST_FRAMES = 64, MOST_BYTES = 1 << 20, MOST_CALLS = 100000 };
enum { ALL = 0 }; /* what a stream comes to besides troubles */

static uint64_t state;

static uint32_t draw(uint32_t below) { /* splitmix64 */
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ (z >> 31)) >> 11) % below;
}

#define FAIL(...) (fprintf(stderr, __VA_ARGS__), fprintf(stderr, "\n"), abort())

static void add(void *out, const void *a, const void *b, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t x, y;
        memcpy(&x, (const char *)a + 4 * i, 4);
        memcpy(&y, (const char *)b + 4 * i, 4);
        x += y;
        memcpy((char *)out + 4 * i, &x, 4);
    }
}

/* ------------------------------------------------------------------------------------------------- a stream */

struct item { /* what the reader waits for: an opening (size 0), or a message, to be added where `sums` */
    int64_t size;
    bool sums;
};
static struct item items[8];
static int item_count, frame_count;
static int64_t part_bytes;
static bool by_ring;
static uint8_t stream[MOST_BYTES], wanted[8][1 << 17];
static int64_t frames[MOST_FRAMES + 1], stream_bytes, frames_fed;

static void put(const void *bytes, int64_t count) {
    memcpy(stream + stream_bytes, bytes, (size_t)count);
    stream_bytes += count;
}

static void begin(int code, uint32_t length) {
    frames[frame_count++] = stream_bytes;
    uint8_t header[8] = {(uint8_t)code, 0, 0, 0, (uint8_t)length, (uint8_t)(length >> 8),
                         (uint8_t)(length >> 16), (uint8_t)(length >> 24)};
    put(header, 8);
}

static void noise(int64_t count) {
    for (int64_t i = 0; i < count; i++)
        stream[stream_bytes++] = (uint8_t)draw(256);
}

static void write_items(void) {
    static const int64_t parts[] = {8, 64, 200, 4096, 96 << 10};
    part_bytes = parts[draw(5)];
    item_count = 1 + (int)draw(7);
    stream_bytes = frame_count = 0;
    for (int i = 0; i < item_count; i++) {
        int64_t most = part_bytes * 3 < (1 << 17) ? part_bytes * 3 : 1 << 17;
        items[i] = (struct item){draw(4) == 0 ? 0 : 1 + draw((uint32_t)most), draw(2)};
        if (items[i].sums)
            items[i].size &= ~3;
        if (items[i].size == 0) {
            begin(OPENING, OPENING_BYTES);
            noise(OPENING_BYTES);
        }
        bool laid = by_ring && draw(3) == 0;
        for (int64_t left = items[i].size, size; left > 0; left -= size) {
            if (frame_count > MOST_FRAMES - 8) {
                item_count = i;
                return;
            }
            size = left < part_bytes ? left : part_bytes;
            if (laid) {
                size = size < PLACE ? size : PLACE;
                begin(LAID, (uint32_t)size);
                uint8_t place[8] = {0, 0, 0, 0, (uint8_t)draw(SHELF_PLACES)};
                put(place, 8);
                put("\0\0\0\0\0\0\0\1", 8);
                continue;
            }
            begin(PART, (uint32_t)size);
            noise(size);
            int trailer = 8 - (int)(size & 7);
            put("\0\0\0\0\0\0\0\1" + 8 - trailer, trailer);
        }
    }
}

static void spoil(uint32_t ways) { /* the first four leave all frames where they are */
    static const uint32_t lengths[] = {0, 1, 7, 8, 63, 64, 65, 2047, 2048, 2049, 1 << 20,
                                       0x7fffffff, 0x80000000, 0xffffffff, 0xfffffff8};
    uint8_t copy[4096];
    frames[frame_count] = stream_bytes;
    int at = (int)draw((uint32_t)frame_count);
    uint8_t *frame = stream + frames[at];
    int64_t size = frames[at + 1] - frames[at];
    uint32_t length = lengths[draw(15)];
    switch (draw(ways)) {
    case 0: /* one byte, wherever */
        stream[draw((uint32_t)stream_bytes)] ^= (uint8_t)(1 << draw(8));
        break;
    case 1: /* a bad trailer, or another place of the shelf */
        frame[size - 1] = (uint8_t)draw(3);
        if (frame[0] == LAID)
            frame[12 + draw(4)] = (uint8_t)draw(256);
        break;
    case 2: /* another length */
        if (draw(2))
            length = (uint32_t)part_bytes + draw(3) - 1;
        for (int i = 0; i < 4; i++)
            frame[4 + i] = (uint8_t)(length >> (8 * i));
        break;
    case 3: /* another code */
        frame[0] = (uint8_t)(draw(2) ? draw(9) : draw(256));
        break;
    case 4: /* a frame is missing */
        memmove(frame, frame + size, (size_t)(stream + stream_bytes - frame - size));
        stream_bytes -= size;
        break;
    case 5: /* or comes twice */
        memmove(frame + size, frame, (size_t)(stream + stream_bytes - frame));
        stream_bytes += size;
        break;
    case 6: /* or before the one that it follows */
        if (at > 0 && size <= (int64_t)sizeof copy) {
            memcpy(copy, frame, (size_t)size);
            memmove(stream + frames[at - 1] + size, stream + frames[at - 1], (size_t)(frames[at] - frames[at - 1]));
            memcpy(stream + frames[at - 1], copy, (size_t)size);
        }
        break;
    case 7: /* cut short */
        stream_bytes = draw((uint32_t)stream_bytes + 1);
        break;
    case 8: /* last words in the middle, perhaps longer than they may be, perhaps after a part given up */
        if (draw(2) && at > 0)
            frame[-1] = 0;
        stream_bytes = frames[at];
        length = draw(3) ? draw(100) : length;
        begin(draw(2) ? ABORT : BYE, length);
        noise(length < 4000 ? length : draw(4000));
        break;
    default: /* anything */
        stream_bytes = frames[at];
        noise(draw(600));
    }
}

/* ------------------------------------------------------------------------------------------------- the judge */

static const uint8_t *shelf; /* the places */
static int64_t judged_at;
static uint8_t judged_reason[REASON_BYTES];
static int judged_gone, judged_reason_bytes;

static bool next(int64_t count, const uint8_t **bytes) {
    if (stream_bytes - judged_at < count)
        return false;
    *bytes = stream + judged_at;
    judged_at += count;
    return true;
}

/* The next header: 1 with its length, or what it comes to. */
static int header(uint32_t *length, int *code, bool only_last) {
    const uint8_t *h, *words;
    if (!next(8, &h))
        return CLOSED;
    *length = h[4] | (uint32_t)h[5] << 8 | (uint32_t)h[6] << 16 | (uint32_t)h[7] << 24;
    *code = h[0];
    if (h[1] || h[2] || h[3])
        return STRANGE;
    if (*code == ABORT || *code == BYE) {
        if (by_ring || *length > REASON_BYTES)
            return STRANGE;
        if (next(*length, &words)) {
            judged_gone = *code == ABORT ? GAVE_UP : LEFT;
            judged_reason_bytes = (int)*length;
            memcpy(judged_reason, words, *length);
        }
        return CLOSED;
    }
    bool is_one = (*code == PART && *length >= 1 && *length <= part_bytes) ||
                  (*code == LAID && by_ring && *length >= 1 && *length <= PLACE) ||
                  (*code == OPENING && *length == OPENING_BYTES);
    return is_one && !only_last ? 1 : STRANGE;
}

/* What a reader must come to: ALL, or the trouble; and how many items are complete before that. */
static int judge(int *complete) {
    const uint8_t *bytes;
    uint32_t length;
    int code, found;
    judged_at = judged_reason_bytes = 0;
    judged_gone = DIED;
    for (*complete = 0; *complete < item_count; ++*complete) {
        int64_t size = items[*complete].size;
        if (size == 0) {
            if ((found = header(&length, &code, false)) < 0)
                return found;
            if (code != OPENING)
                return DISAGREES;
            if (!next(OPENING_BYTES, &bytes))
                return CLOSED;
            memcpy(wanted[*complete], bytes, OPENING_BYTES);
        }
        for (int64_t done = 0; done < size; done += length) {
            int64_t due = size - done < part_bytes ? size - done : part_bytes;
            if ((found = header(&length, &code, false)) < 0)
                return found;
            if (code != PART && code != LAID)
                return DISAGREES;
            if (length != (code == LAID && due > PLACE ? PLACE : due))
                return DISAGREES;
            int64_t trailer = 8 - (length & 7);
            if (code == LAID) {
                trailer = 8;
                if (!next(8, &bytes))
                    return CLOSED;
                uint32_t place = bytes[4] | (uint32_t)bytes[5] << 8 | (uint32_t)bytes[6] << 16 |
                                 (uint32_t)bytes[7] << 24;
                if (place >= SHELF_PLACES)
                    return STRANGE;
                bytes = shelf + place * PLACE;
            } else if (!next(length, &bytes)) {
                return CLOSED;
            }
            memcpy(wanted[*complete] + done, bytes, length);
            if (!next(trailer, &bytes))
                return CLOSED;
            if (bytes[trailer - 1] != 1)
                return header(&length, &code, true);
        }
    }
    return ALL;
}

/* ------------------------------------------------------------------------------------------------ the reader */

static int ours, theirs;
static struct channel *c;
static int64_t fed;

/* The peer's next bytes, some of them; whether all are there. */
static bool feed(void) {
    int64_t count = draw(3) ? 1 + draw(48) : 1 + draw(70000);
    if (count > stream_bytes - fed)
        count = stream_bytes - fed;
    if (by_ring) {
        uint64_t head = atomic_load(&c->in->head), room = RING - (head - atomic_load(&c->in->tail));
        if ((uint64_t)count > room)
            count = (int64_t)room;
        for (int64_t i = 0; i < count; i++)
            ((uint8_t *)c->in)[RING_AT + (head + (uint64_t)i) % RING] = stream[fed + i];
        atomic_store(&c->in->head, head + (uint64_t)count);
    } else if (count > 0) {
        count = send(theirs, stream + fed, (size_t)count, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    fed += count > 0 ? count : 0;
    if (fed < stream_bytes)
        return false;
    shutdown(theirs, SHUT_WR);
    return true;
}

static int64_t with_peer(int64_t got) { /* a call that got nothing: more comes, and the channel is looked at */
    if (got != 0)
        return got;
    bool is_all = feed();
    c->is_dry = 0;
    if (is_all || draw(3) == 0)
        return channel_look(c);
    return 0;
}

static int64_t read_item(const struct item *item, uint8_t *into, const uint8_t *with, int64_t *done) {
    if (item->size == 0) {
        int32_t is_here = channel_opening(c);
        if (is_here > 0)
            memcpy(into, c->opening, OPENING_BYTES);
        *done = is_here > 0;
        return is_here;
    }
    int64_t got = with != NULL ? channel_combine(c, into + *done, with + *done, item->size - *done, add, 4)
                               : channel_receive(c, into + *done, item->size - *done);
    if (got > item->size - *done)
        FAIL("%lld bytes came where %lld were left", (long long)got, (long long)(item->size - *done));
    *done += got > 0 ? got : 0;
    return got;
}

static int read_all(int *complete) {
    int calls = 0;
    for (*complete = 0; *complete < item_count; ++*complete) {
        const struct item *item = &items[*complete];
        int64_t size = item->size ? item->size : OPENING_BYTES, done = 0;
        uint8_t *into = calloc(1, (size_t)size), *with = item->sums && item->size ? malloc((size_t)size) : NULL;
        for (int64_t i = 0; with != NULL && i < size; i++)
            with[i] = (uint8_t)draw(256);
        while (done < (item->size ? item->size : 1)) {
            int64_t got = with_peer(read_item(item, into, with, &done));
            if (got < 0) {
                free(into);
                free(with);
                return (int)got;
            }
            channel_wanted(c, 1, 0);
            channel_awake(c);
            if (++calls > MOST_CALLS)
                FAIL("the reader does not come to an end");
        }
        if (with != NULL)
            add(wanted[*complete], wanted[*complete], with, size / 4);
        if (memcmp(into, wanted[*complete], (size_t)size) != 0)
            FAIL("item %d of %lld bytes is not what was sent", *complete, (long long)size);
        free(into);
        free(with);
    }
    return ALL;
}

static struct ring *new_ring(void) {
    struct ring *ring = aligned_alloc(64, RING_AT + RING);
    memset(ring, 0, RING_AT + RING);
    uint64_t begun = 8 * (uint64_t)draw(1000);
    atomic_store(&ring->head, begun);
    atomic_store(&ring->tail, begun);
    return ring;
}

/* What a peer can write where both can, that no stream has: counters that cannot be. */
static void wild(void) {
    static const uint64_t counters[] = {0, 1, 255, 257, 1u << 31, 1ull << 63, -1ull, (1ull << 63) - 7};
    uint8_t *data = calloc(1, 700);
    for (int i = 0; i < 20; i++) {
        _Atomic uint64_t *counter[] = {&c->in->head, &c->in->tail, &c->out->head, &c->out->tail};
        atomic_store(counter[draw(4)], draw(2) ? counters[draw(8)] : atomic_load(counter[draw(4)]) + draw(40));
        int64_t size = 4 * (1 + (int64_t)draw(170));
        switch (draw(5)) {
        case 0: channel_send(c, data, size); break;
        case 1: channel_open(c, data, 0); break;
        case 2: channel_receive(c, data, size); break;
        case 3: channel_opening(c); break;
        default: channel_combine(c, data, data, size, add, 4);
        }
        if (c->part_left > 700) /* what the next call could be given */
            FAIL("a part of %lld bytes where 700 were due", (long long)c->part_left);
        if (c->part_left > 0 || c->trailer_left != 0 || c->owed > 0)
            break; /* the next call would have to go on with the same message */
        channel_wanted(c, 1, 1);
    }
    free(data);
}

static void hear_words(void) { /* what comes over the socket of a ring: zeros, last words, or neither */
    uint8_t words[3000];
    stream_bytes = frame_count = 0;
    int64_t zeros = draw(300);
    memset(words, 0, (size_t)zeros);
    uint32_t length = draw(3) ? draw(200) : 2000 + draw(100);
    begin(draw(4) ? ABORT : (int)draw(256), draw(4) ? length : draw(1u << 31) * 2);
    noise(length);
    memcpy(words + zeros, stream, (size_t)stream_bytes);
    by_ring = false; /* for the judge: words as they come over a socket */
    judged_at = judged_reason_bytes = 0;
    judged_gone = DIED;
    uint32_t said;
    int code, meant = stream[0] == 0 ? CLOSED : header(&said, &code, true);
    int64_t sent = 0, all = zeros + stream_bytes;
    int found = 0;
    while (sent < all && found == 0) {
        int64_t count = 1 + draw(500);
        sent += send(theirs, words + sent, (size_t)(count < all - sent ? count : all - sent), MSG_NOSIGNAL);
        found = channel_look(c);
    }
    shutdown(theirs, SHUT_WR);
    if (found == 0)
        found = channel_look(c);
    if (stream[0] != 0 && found != meant)
        FAIL("words that come to %d came to %d", meant, found);
    if (found == STRANGE)
        for (int i = 0; i < 3000; i++) { /* as often as anybody asks */
            (void)!send(theirs, "a", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (channel_look(c) != STRANGE)
                FAIL("strange words are forgotten");
        }
    else if (stream[0] != 0 && (c->gone != judged_gone || (judged_gone != DIED &&
             (c->reason_have != judged_reason_bytes || memcmp(c->reason, judged_reason, (size_t)c->reason_have)))))
        FAIL("last words are not those that were said");
}

int main(int count, char **words) {
    if (count != 3)
        return 2;
    long streams = atol(words[2]);
    long ends[6] = {0};
    for (long number = 0; number < streams; number++) {
        state = strtoull(words[1], NULL, 10) * 1000003 + (uint64_t)number;
        int pair[2], kind = (int)draw(8);
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0)
            FAIL("no socket pair");
        ours = pair[0], theirs = pair[1];
        by_ring = kind >= 4;
        c = calloc(1, sizeof *c);
        write_items();
        for (int i = frame_count > 0 ? (int)draw(4) : 0; i > 0; i--)
            spoil(i == 1 ? 10 : 4);
        c->fd = ours;
        c->part_bytes = part_bytes;
        c->low_water = 1;
        c->place = -1;
        c->most = draw(3) ? 0 : 1 + draw(100);
        uint8_t *memory = NULL;
        if (by_ring) {
            c->ring_bytes = RING;
            c->in = new_ring();
            c->out = new_ring();
            memory = aligned_alloc(64, SHELF_AT + SHELF_PLACES * PLACE);
            for (int i = 0; i < SHELF_AT + SHELF_PLACES * PLACE; i++)
                memory[i] = (uint8_t)draw(256);
            c->their_shelf = (struct readers *)memory;
            c->place_bytes = PLACE;
            shelf = memory + SHELF_AT;
        } else {
            c->landing = malloc(LANDING_BYTES);
        }
        fed = 0;
        frames_fed += frame_count;
        if (kind == 7) {
            c->part_bytes = part_bytes = 64;
            draw(2) ? wild() : hear_words();
        } else {
            int due_complete, complete, meant = judge(&due_complete), found = read_all(&complete);
            if (found != meant || complete != due_complete)
                FAIL("seed %s stream %ld: %d after %d items, must be %d after %d", words[1], number, found, complete,
                     meant, due_complete);
            if (found == CLOSED && (c->gone != judged_gone || c->reason_have < judged_reason_bytes ||
                                    memcmp(c->reason, judged_reason, (size_t)judged_reason_bytes) != 0))
                FAIL("seed %s stream %ld: the peer went as %d, must be %d", words[1], number, c->gone, judged_gone);
            ends[-found]++;
        }
        while (!by_ring && !feed() && draw(50)) { /* what is left, for who looks for last words */
        }
        if (channel_last_words(c) != CLOSED || c->gone == HERE)
            FAIL("a channel whose peer is gone is not closed");
        channel_release(c);
        free(c->in), free(c->out), free(c->landing), free(memory), free(c);
        close(ours), close(theirs);
    }
    printf("%ld streams of %lld frames: %ld complete, %ld closed, %ld disagree, %ld strange\n", streams,
           (long long)frames_fed, ends[0], ends[1], ends[2], ends[3]);
    return 0;
}

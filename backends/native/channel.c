/* Frames over one channel, through a socket or through rings in shared memory; see `native.h`.

   Through memory, the socket carries no parts: single zero bytes that wake an end which said, in the ring, that
   it sleeps; and the last words. What was written to the ring before those is read first. */

#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "native.h"

enum {
    BATCH = 64,                /* parts that leave by one call */
    LONG_BYTES = 64 << 10,     /* what is left of a part: more is read to its place, with no copy between */
    SHARE_BYTES = 128 << 10,   /* written to a ring before the other end may read it */
    TURN_BYTES = 256 << 10,    /* written to a ring, or read, before something else has its turn */
    LOW_WATER_BYTES = 128 << 10,
    LAID_BYTES = 24,           /* header, place, trailer */
    SPOILT = -1,               /* instead of what is left of a trailer: the part before has ended with a bad one */
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void note(struct channel *c, int64_t bytes) {
    struct timespec now;
    c->moved += bytes < 0 ? -bytes : bytes;
    if (c->moments == NULL || bytes == 0 || c->moments_count == c->moments_room)
        return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    c->moments[c->moments_count++] = (struct moment){(double)now.tv_sec + 1e-9 * (double)now.tv_nsec, bytes};
}

/* Make room behind the `have` bytes of a growing buffer for `more`. */
static bool grow(uint8_t **buffer, int64_t *room, int64_t have, int64_t more) {
    if (have + more <= *room)
        return true;
    int64_t wanted = 2 * (have + more);
    uint8_t *grown = realloc(*buffer, (size_t)wanted);
    if (grown == NULL)
        return false;
    *buffer = grown;
    *room = wanted;
    return true;
}

/* ------------------------------------------------------------------------------------------------ raw bytes */

static inline uint8_t *ring_bytes_of(struct ring *ring) { return (uint8_t *)ring + RING_AT; }

/* Wake the other end if it has said that it sleeps. */
static void tell(struct channel *c, _Atomic uint32_t *sleeps) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(sleeps, memory_order_relaxed) && atomic_exchange(sleeps, 0))
        /* No room means that bytes are there that wake it; a peer that is gone is noticed elsewhere. */
        (void)!send(c->fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Bytes between two counters of a ring. The peer may write anything there: BROKEN where it cannot be. */
static inline int64_t between(const struct channel *c, uint64_t head, uint64_t tail) {
    return head - tail <= (uint64_t)c->ring_bytes ? (int64_t)(head - tail) : BROKEN;
}

static int64_t ring_write(struct channel *c, const uint8_t *data, int64_t size) {
    struct ring *ring = c->out;
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    int64_t done = 0;
    while (done < size) {
        int64_t held = between(c, head, atomic_load_explicit(&ring->tail, memory_order_acquire));
        if (held < 0)
            return held;
        int64_t room = c->ring_bytes - held;
        int64_t at = (int64_t)(head % (uint64_t)c->ring_bytes);
        int64_t count = least(least(size - done, room), least(c->ring_bytes - at, SHARE_BYTES));
        if (count < size - done)
            count -= (int64_t)((head + (uint64_t)count) & 7); /* so that no element is there in part */
        if (count <= 0)
            break;
        memcpy(ring_bytes_of(ring) + at, data + done, (size_t)count);
        done += count;
        head += (uint64_t)count;
        atomic_store_explicit(&ring->head, head, memory_order_release);
        if (count == SHARE_BYTES)
            tell(c, &ring->reader_sleeps);
    }
    return done;
}

/* Bytes that were written, 0 where there is no room now. */
static int64_t write_some(struct channel *c, struct iovec *parts, int count) {
    int64_t total = 0;
    if (c->most > 0) { /* as if there were room for no more */
        int64_t left = c->most;
        for (int i = 0; i < count; i++) {
            parts[i].iov_len = (size_t)least((int64_t)parts[i].iov_len, left);
            left -= (int64_t)parts[i].iov_len;
        }
    }
    if (c->out != NULL) {
        for (int i = 0; i < count && total < TURN_BYTES; i++) {
            int64_t written = ring_write(c, parts[i].iov_base, (int64_t)parts[i].iov_len);
            if (written < 0)
                return written;
            total += written;
            if (written < (int64_t)parts[i].iov_len)
                break;
        }
        if (total > 0)
            tell(c, &c->out->reader_sleeps);
        return total;
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t sent = sendmsg(c->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0)
        return sent;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOBUFS)
        return 0;
    return channel_last_words(c);
}

/* Bytes that were read from the socket, 0 where nothing is there now. */
static int64_t read_socket(struct channel *c, struct iovec *parts, int count) {
    int64_t asked = 0;
    if (c->gone)
        return CLOSED;
    for (int i = 0; i < count; i++) {
        if (c->most > 0)
            parts[i].iov_len = (size_t)least((int64_t)parts[i].iov_len, c->most - asked);
        asked += (int64_t)parts[i].iov_len;
    }
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t got = recvmsg(c->fd, &message, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        c->is_dry = 1;
        return 0;
    }
    if (got <= 0) {
        c->gone = DIED;
        return CLOSED;
    }
    c->is_dry = got < asked && c->most == 0;
    return got;
}

static int64_t read_landing(struct channel *c) {
    if (c->landed_at == c->landed_end)
        c->landed_at = c->landed_end = 0;
    if (c->landed_at > 0 && c->landed_end == LANDING_BYTES) {
        memmove(c->landing, c->landing + c->landed_at, (size_t)(c->landed_end - c->landed_at));
        c->landed_end -= c->landed_at;
        c->landed_at = 0;
    }
    struct iovec room = {c->landing + c->landed_end, (size_t)(LANDING_BYTES - c->landed_end)};
    int64_t got = read_socket(c, &room, 1);
    if (got > 0)
        c->landed_end += got;
    return got;
}

/* Bytes that lie at `*at` unread, 0 where nothing is there now. More than `have` of them are wanted. */
static int64_t peek(struct channel *c, const uint8_t **at, int64_t have) {
    if (c->in != NULL) {
        uint64_t tail = atomic_load_explicit(&c->in->tail, memory_order_relaxed);
        int64_t there = between(c, atomic_load_explicit(&c->in->head, memory_order_acquire), tail);
        if (there < 0)
            return there;
        int64_t place = (int64_t)(tail % (uint64_t)c->ring_bytes);
        *at = ring_bytes_of(c->in) + place;
        there = least(there, c->ring_bytes - place);
        if (c->most > 0)
            there = least(there, c->most < 8 ? 8 : c->most); /* elements are not taken apart */
        if (there > have)
            return there;
        return c->gone ? CLOSED : 0;
    }
    while (c->landed_end - c->landed_at <= have) {
        if (c->is_dry && !c->gone)
            return 0;
        int64_t got = read_landing(c);
        if (got <= 0)
            return got;
    }
    *at = c->landing + c->landed_at;
    return c->landed_end - c->landed_at;
}

static void drop(struct channel *c, int64_t size) {
    if (c->in == NULL) {
        c->landed_at += size;
        return;
    }
    uint64_t tail = atomic_load_explicit(&c->in->tail, memory_order_relaxed);
    atomic_store_explicit(&c->in->tail, tail + (uint64_t)size, memory_order_release);
    tell(c, &c->in->writer_sleeps);
}

/* ------------------------------------------------------------------------------------------------- sending */

static inline int32_t trailer_of(int64_t length) { return 8 - (int32_t)(length & 7); }

static const uint8_t good_trailer[8] = {0, 0, 0, 0, 0, 0, 0, 1}; /* as many of its last bytes as are needed */

static void put_number(uint8_t *bytes, int64_t number) {
    for (int i = 0; i < 4; i++)
        bytes[4 + i] = (uint8_t)((uint32_t)number >> (8 * i));
}

static void put_header(uint8_t *header, int32_t code, int64_t length) {
    memset(header, 0, HEADER_BYTES);
    header[0] = (uint8_t)code;
    put_number(header, length);
}

static int32_t keep(struct channel *c, const uint8_t *data, int64_t size) {
    if (!grow(&c->outbox, &c->outbox_room, c->outbox_bytes, size))
        return NO_MEMORY;
    memcpy(c->outbox + c->outbox_bytes, data, (size_t)size);
    c->outbox_bytes += size;
    return 0;
}

static void unkeep(struct channel *c, int64_t size) {
    memmove(c->outbox, c->outbox + size, (size_t)(c->outbox_bytes - size));
    c->outbox_bytes -= size;
}

static int64_t flush(struct channel *c) {
    while (c->outbox_bytes > 0) {
        struct iovec all = {c->outbox, (size_t)c->outbox_bytes};
        int64_t sent = write_some(c, &all, 1);
        if (sent <= 0)
            return sent;
        unkeep(c, sent);
    }
    return 0;
}

/* Send the opening of a collective; it is kept where there is no room now, or where a message to the same peer
   `follows` at once, and takes it along: two calls of the kernel would wake the peer twice. */
int32_t channel_open(struct channel *c, const uint8_t *opening, int32_t follows) {
    uint8_t frame[HEADER_BYTES + OPENING_BYTES];
    if (c->gone)
        return CLOSED;
    put_header(frame, OPENING, OPENING_BYTES);
    memcpy(frame + HEADER_BYTES, opening, OPENING_BYTES);
    int32_t kept = keep(c, frame, sizeof frame);
    return kept < 0 || follows ? kept : (int32_t)flush(c);
}

/* Send frames of consecutive parts by one call, as many as there is room for. Returns the bytes of messages
   that were handed over. */
static int64_t send_parts(struct channel *c, const struct message *parts, int count, bool *is_all) {
    struct iovec pieces[3 * BATCH + 1];
    uint8_t headers[BATCH][HEADER_BYTES];
    int32_t header_bytes[BATCH], trailers[BATCH];
    int used = 0;
    int64_t total = c->outbox_bytes;
    pieces[used++] = (struct iovec){c->outbox, (size_t)c->outbox_bytes};
    for (int i = 0; i < count; i++) {
        bool is_rest = i == 0 && c->owed > 0;
        header_bytes[i] = is_rest ? 0 : HEADER_BYTES;
        trailers[i] = is_rest ? c->owed_trailer : trailer_of(parts[i].size);
        put_header(headers[i], PART, parts[i].size);
        pieces[used++] = (struct iovec){headers[i], (size_t)header_bytes[i]};
        pieces[used++] = (struct iovec){(void *)parts[i].data, (size_t)parts[i].size};
        pieces[used++] = (struct iovec){(void *)(good_trailer + 8 - trailers[i]), (size_t)trailers[i]};
        total += header_bytes[i] + parts[i].size + trailers[i];
    }
    int64_t sent = write_some(c, pieces, used), taken = 0;
    if (sent < 0)
        return sent;
    *is_all = sent == total;
    if (sent < c->outbox_bytes) {
        unkeep(c, sent);
        return 0;
    }
    sent -= c->outbox_bytes;
    c->outbox_bytes = 0;
    for (int i = 0; i < count; i++) { /* which bytes of which frames were taken */
        if (sent <= 0 && header_bytes[i] > 0)
            break;
        if (sent < header_bytes[i]) {
            c->owed = parts[i].size;
            c->owed_trailer = trailers[i];
            return keep(c, headers[i] + sent, header_bytes[i] - sent) < 0 ? NO_MEMORY : taken;
        }
        sent -= header_bytes[i];
        if (sent < parts[i].size) {
            c->owed = parts[i].size - sent;
            c->owed_trailer = trailers[i];
            return taken + sent;
        }
        taken += parts[i].size;
        sent -= parts[i].size;
        c->owed = 0;
        if (sent < trailers[i]) {
            if (keep(c, good_trailer + 8 - trailers[i] + sent, trailers[i] - sent) < 0)
                return NO_MEMORY;
            return taken;
        }
        sent -= trailers[i];
    }
    return taken;
}

/* Hand over a prefix of several messages, of the first of which `skipped` bytes are; returns its bytes. What
   was handed over may be overwritten; the next call continues where this one stopped. */
int64_t channel_send_all(struct channel *c, const struct message *messages, int32_t count, int64_t skipped) {
    int64_t done = 0, at = skipped;
    int32_t next = 0;
    if (c->gone)
        return CLOSED;
    c->is_full = 0;
    c->awaits_shelf = 0;
    while (next < count) {
        struct message parts[BATCH];
        int used = 0;
        int32_t end = next;
        int64_t end_at = at;
        while (end < count && used < BATCH) {
            int64_t left = messages[end].size - end_at;
            int64_t size = used == 0 && c->owed > 0 ? c->owed : least(left, c->part_bytes);
            if (left > 0) {
                parts[used++] = (struct message){messages[end].data + end_at, size};
                end_at += size;
            }
            if (end_at == messages[end].size) {
                end++;
                end_at = 0;
            }
        }
        bool is_all = false;
        int64_t taken = used == 0 ? 0 : send_parts(c, parts, used, &is_all);
        if (taken < 0)
            return taken;
        done += taken;
        if (used == 0 || is_all) {
            next = end;
            at = end_at;
            continue;
        }
        at += taken;
        while (next < count && at >= messages[next].size)
            at -= messages[next++].size;
        /* Where only a trailer waits for room, the caller need not come again for it. */
        c->is_full = next < count;
        break;
    }
    note(c, done);
    return done;
}

/* Bytes that the peer has not read, or BROKEN; of rings alone. */
static int64_t held(const struct channel *c) {
    return between(c, atomic_load_explicit(&c->out->head, memory_order_relaxed), atomic_load(&c->out->tail));
}

/* The same of one message that others are sent, too, from `at` on: its parts are laid on the shelf.

   Where that has no room the peer waits for some while it has something to read, and else is sent a copy: it
   may be the one that the readers wait for. */
int64_t channel_send_laid(struct channel *c, int64_t share, int64_t at, const uint8_t *data, int64_t size) {
    struct shelf *shelf = c->shelf;
    int64_t done = 0;
    if (c->gone)
        return CLOSED;
    c->is_full = c->awaits_shelf = 0;
    while (done < size && done < TURN_BYTES) {
        uint8_t frame[LAID_BYTES];
        int64_t flushed = flush(c);
        if (flushed < 0)
            return flushed;
        if (c->outbox_bytes > 0) {
            c->is_full = 1;
            break;
        }
        int64_t length = least(least(size - done, c->part_bytes), shelf->place_bytes);
        int32_t place = shelf_lay(shelf, share, at + done, data + done, length);
        if (place < 0 && held(c) > 0) {
            c->is_full = c->awaits_shelf = 1;
            break;
        }
        if (place < 0) {
            struct message rest = {data, size};
            note(c, done);
            int64_t sent = channel_send_all(c, &rest, 1, done);
            return sent < 0 ? sent : done + sent;
        }
        put_header(frame, LAID, length);
        put_header(frame + HEADER_BYTES, 0, place);
        memcpy(frame + LAID_BYTES - 8, good_trailer, 8);
        atomic_fetch_add(&shelf->readers[place].count, 1);
        if (keep(c, frame, LAID_BYTES) < 0)
            return NO_MEMORY;
        done += length;
    }
    note(c, done);
    int64_t flushed = flush(c);
    return flushed < 0 ? flushed : done;
}

/* The same of one message. */
int64_t channel_send(struct channel *c, const uint8_t *data, int64_t size) {
    struct message message = {data, size};
    return channel_send_all(c, &message, 1, 0);
}

/* ----------------------------------------------------------------------------------------------- receiving */

/* Read up to `size` bytes to a place; `*have` of them are there. 1 where all are, 0 where nothing more is now. */
static int32_t gather(struct channel *c, uint8_t *into, int32_t *have, int32_t size) {
    while (*have < size) {
        const uint8_t *at = NULL;
        int64_t there = peek(c, &at, 0);
        if (there <= 0) {
            c->missing = size - *have;
            return (int32_t)there;
        }
        there = least(there, size - *have);
        memcpy(into + *have, at, (size_t)there);
        drop(c, there);
        *have += (int32_t)there;
    }
    return 1;
}

static int32_t length_in(const uint8_t *header) {
    uint32_t length = 0;
    for (int i = 0; i < 4; i++)
        length |= (uint32_t)header[4 + i] << (8 * i);
    return (int32_t)length;
}

/* Whether a header is one. The peer may send anything: what is longer than it can be is refused here. */
static bool is_header(const struct channel *c, const uint8_t *header) {
    int32_t length = length_in(header); /* negative from 2 GiB on */
    if (header[1] | header[2] | header[3])
        return false;
    switch (header[0]) {
    case PART:
        return length > 0 && length <= c->part_bytes;
    case LAID:
        return c->their_shelf != NULL && length > 0 && length <= c->place_bytes;
    case OPENING:
        return length == OPENING_BYTES;
    case ABORT:
    case BYE:
        return length >= 0 && length <= REASON_BYTES;
    default:
        return false;
    }
}

static bool is_last(int32_t code) { return code == ABORT || code == BYE; }

static int32_t end(struct channel *c, int32_t code) {
    c->gone = code == BYE ? LEFT : GAVE_UP;
    return CLOSED;
}

/* 1 where the header of the next frame is here, and is not one that ends the channel; else 0 or trouble. */
static int32_t see_header(struct channel *c) {
    if (c->header_have < HEADER_BYTES) {
        int32_t is_here = gather(c, c->header, &c->header_have, HEADER_BYTES);
        if (is_here <= 0)
            return is_here;
        c->code = c->header[0];
        c->length = length_in(c->header);
    }
    /* Last words never come through a ring, and nothing else comes after a part that was given up. */
    if (!is_header(c, c->header) || (is_last(c->code) ? c->in != NULL : c->trailer_left == SPOILT))
        return STRANGE;
    if (!is_last(c->code))
        return 1;
    int32_t is_here = gather(c, c->reason, &c->reason_have, c->length);
    return is_here <= 0 ? is_here : end(c, c->code);
}

/* What came over the socket of a channel through memory: bytes that wake, and last words. */
static int32_t hear(struct channel *c) {
    uint8_t heard[256];
    struct iovec room = {heard, sizeof heard};
    int64_t got;
    if (c->words_have == HEADER_BYTES && !(is_header(c, c->words) && is_last(c->words[0])))
        return STRANGE; /* as before */
    while ((got = read_socket(c, &room, 1)) > 0) {
        for (int64_t i = 0; i < got; i++) {
            if (c->words_have == 0 && heard[i] == 0)
                continue;
            if (c->words_have < HEADER_BYTES)
                c->words[c->words_have++] = heard[i];
            else
                c->reason[c->reason_have++] = heard[i];
            if (c->words_have < HEADER_BYTES)
                continue;
            if (!is_header(c, c->words) || !is_last(c->words[0])) {
                memcpy(c->header, c->words, HEADER_BYTES);
                return STRANGE;
            }
            if (c->reason_have == length_in(c->words))
                return end(c, c->words[0]);
        }
        room = (struct iovec){heard, sizeof heard};
    }
    return (int32_t)got;
}

/* Whether a part of `length` bytes has begun: 1, 0 while its header is not here, or trouble. */
static int32_t begin_part(struct channel *c, int64_t length) {
    if (c->trailer_left > 0)
        return 1;
    int32_t is_here = see_header(c);
    if (is_here <= 0) {
        c->missing += length + trailer_of(length);
        return is_here;
    }
    /* All of it, or as much of it as a place holds: the elements of what is due never lie in two parts. */
    if (c->code == LAID ? c->length != least(length, c->place_bytes)
                        : c->code != PART || c->length != length) {
        c->due = (int32_t)length;
        return DISAGREES;
    }
    if (c->code == LAID) {
        is_here = gather(c, c->opening, &c->opening_have, HEADER_BYTES);
        if (is_here <= 0)
            return is_here;
        int32_t place = length_in(c->opening);
        if (place < 0 || place >= SHELF_PLACES)
            return STRANGE; /* again whenever it is asked: all of it stays here */
        c->opening_have = 0;
        c->place = place;
    }
    c->header_have = 0;
    c->part_left = c->length;
    c->trailer_left = c->code == LAID ? 8 : trailer_of(length);
    return 1;
}

static const uint8_t *laid(const struct channel *c) {
    return shelf_place(c->their_shelf, c->place_bytes, c->place) + c->length - c->part_left;
}

/* End a part of which all bytes are here: 1 with its good trailer, 0 where that is not here, or trouble. */
static int32_t end_part(struct channel *c) {
    while (c->trailer_left > 0) {
        const uint8_t *at = NULL;
        int64_t there = peek(c, &at, 0);
        if (there <= 0) {
            c->missing = c->trailer_left;
            return (int32_t)there;
        }
        there = least(there, c->trailer_left);
        bool is_good = there < c->trailer_left || at[there - 1] == 1;
        drop(c, there);
        c->trailer_left -= (int32_t)there;
        if (!is_good) { /* why comes next */
            c->trailer_left = SPOILT;
            return see_header(c);
        }
    }
    return 1;
}

/* Read the rest of a long part to its place, and what follows to where frames land. */
static int64_t read_long(struct channel *c, uint8_t *into, int64_t size) {
    struct iovec parts[2] = {{into, (size_t)size}, {c->landing, LANDING_BYTES}};
    if (c->is_dry)
        return 0;
    /* What follows is the trailer and, ahead of its time, the next header: more of a long part would be copied. */
    parts[1].iov_len = (size_t)(c->trailer_left + HEADER_BYTES);
    int64_t got = read_socket(c, parts, 2);
    if (got > size) {
        c->landed_at = 0;
        c->landed_end = got - size;
        got = size;
    }
    return got;
}

/* Take the next bytes of a part that has begun to `into`, or combine them with those of `with`. */
static int64_t take(struct channel *c, uint8_t *into, const uint8_t *with, combine *combine,
                    int64_t item_bytes) {
    if (with == NULL && c->in == NULL && c->landed_at == c->landed_end && c->part_left >= LONG_BYTES) {
        int64_t got = read_long(c, into, c->part_left);
        if (got > 0)
            c->part_left -= got;
        return got;
    }
    const uint8_t *at = NULL;
    int64_t there;
    if (c->place >= 0) {
        at = laid(c);
        there = c->most > 0 ? least(c->part_left, c->most < 8 ? 8 : c->most) : c->part_left;
    } else {
        there = peek(c, &at, item_bytes - 1);
    }
    if (there <= 0)
        return there;
    there = least(least(there, c->part_left), SHARE_BYTES) / item_bytes * item_bytes;
    if (with == NULL)
        memcpy(into, at, (size_t)there);
    else
        combine(into, with, at, there / item_bytes);
    c->part_left -= there;
    if (c->place < 0) {
        drop(c, there);
    } else if (c->part_left == 0) { /* before the trailer is read, which wakes a writer that waits for room */
        atomic_fetch_sub(&c->their_shelf[c->place].count, 1);
        c->place = -1;
    }
    return there;
}

static int64_t receive(struct channel *c, uint8_t *into, const uint8_t *with, int64_t size, combine *combine,
                       int64_t item_bytes) {
    int64_t done = 0;
    while (done < size && done < TURN_BYTES) {
        bool is_held = c->trailer_left > 0 && c->part_left == 0; /* all but the last byte was counted */
        int64_t begun = begin_part(c, least(size - done, c->part_bytes));
        if (begun <= 0)
            return done > 0 ? done : begun; /* the next call says so again */
        while (c->part_left > 0) {
            int64_t got = take(c, into + done, with == NULL ? NULL : with + done, combine, item_bytes);
            if (got <= 0) {
                /* Without what has landed of an element: the kernel knows of what comes alone. */
                c->missing = c->part_left + c->trailer_left - (c->landed_end - c->landed_at);
                return done > 0 ? done : got;
            }
            note(c, -got);
            done += got;
            if (done >= TURN_BYTES && c->part_left > 0)
                return done;
        }
        int32_t is_good = end_part(c);
        if (is_good <= 0) {
            done -= !is_held;
            return done > 0 ? done : is_good;
        }
        done += is_held;
    }
    return done;
}

/* Fill a prefix of what is left of a message; returns its bytes, 0 where nothing is there now. */
int64_t channel_receive(struct channel *c, uint8_t *into, int64_t size) {
    return receive(c, into, NULL, size, NULL, 1);
}

/* The same, but what comes is combined with what lies at `with`. */
int64_t channel_combine(struct channel *c, uint8_t *out, const uint8_t *with, int64_t size, combine *combine,
                        int64_t item_bytes) {
    return receive(c, out, with, size, combine, item_bytes);
}

/* 1 where the peer's next opening is here, in `opening`; 0 where it is not. */
int32_t channel_opening(struct channel *c) {
    if (c->trailer_left > 0)
        return 0;
    int32_t is_here = see_header(c);
    if (is_here > 0 && c->code != OPENING) {
        c->due = -1;
        return DISAGREES;
    }
    if (is_here > 0)
        is_here = gather(c, c->opening, &c->opening_have, OPENING_BYTES);
    if (is_here > 0)
        c->header_have = c->opening_have = 0;
    return is_here;
}

/* Whether the receiver could go on, or the sender, without a look at the descriptor; only of rings. */
static bool is_readable(const struct channel *c) {
    return atomic_load(&c->in->head) != atomic_load_explicit(&c->in->tail, memory_order_relaxed);
}

/* To be called when the descriptor is readable or writable: move what moves by itself, notice the end. */
int32_t channel_look(struct channel *c) {
    if (c->in != NULL) {
        int32_t heard = hear(c);
        if (heard == STRANGE || (c->gone && !is_readable(c)))
            return c->gone ? CLOSED : heard;
    } else if (c->gone) {
        return CLOSED;
    }
    c->is_dry = c->is_full = 0;
    if (!c->gone) {
        int64_t flushed = flush(c);
        if (flushed < 0)
            return (int32_t)flushed;
    }
    if (c->in == NULL && c->trailer_left <= 0) {
        int32_t seen = see_header(c);
        if (seen < 0)
            return seen;
    }
    return 0;
}

/* Why a peer is gone, as far as it said; what is unread may be lost. Returns CLOSED. */
int32_t channel_last_words(struct channel *c) {
    while (!c->gone) {
        int32_t found;
        if (c->in != NULL) {
            found = hear(c);
        } else if (c->trailer_left > 0) { /* skip what comes before */
            const uint8_t *at = NULL;
            c->is_dry = 0;
            found = (int32_t)peek(c, &at, 0);
            if (found > 0) {
                int64_t skipped = least(found, c->part_left + c->trailer_left);
                int64_t of_part = least(skipped, c->part_left);
                drop(c, skipped);
                c->part_left -= of_part;
                c->trailer_left -= (int32_t)(skipped - of_part);
            }
        } else {
            c->is_dry = 0;
            found = see_header(c);
            if (found > 0 && c->code == OPENING) {
                found = gather(c, c->opening, &c->opening_have, OPENING_BYTES);
                if (found > 0)
                    c->header_have = c->opening_have = 0;
            } else if (found > 0) {
                c->header_have = 0;
                c->part_left = c->length;
                c->trailer_left = trailer_of(c->length);
            }
        }
        if (found <= 0 && !c->gone)
            c->gone = DIED;
    }
    return CLOSED;
}

/* Let the kernel wake a receiver only when a part is all here, or much of it: waking costs as much as a part. */
static void want_much(struct channel *c) {
    int32_t wanted = (int32_t)least(c->missing > 0 ? c->missing : 1, LOW_WATER_BYTES);
    if (wanted == c->low_water)
        return;
    (void)setsockopt(c->fd, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
    c->low_water = wanted;
}

/* What to poll the descriptor for before sleeping; -1 where there is something to do already.

   Args: whether what comes is wanted, whether something is to be sent. */
int32_t channel_wanted(struct channel *c, int32_t reads, int32_t sends) {
    if (c->in == NULL) {
        if (reads)
            want_much(c);
        return (reads ? POLLIN : 0) | ((c->is_full || c->outbox_bytes > 0) && !c->gone ? POLLOUT : 0);
    }
    bool waits_for_room = (sends || c->outbox_bytes > 0) && !c->gone;
    if (reads)
        atomic_store(&c->in->reader_sleeps, 1);
    if (waits_for_room)
        atomic_store(&c->out->writer_sleeps, 1);
    atomic_thread_fence(memory_order_seq_cst);
    if (reads && is_readable(c))
        return -1;
    if (waits_for_room && c->awaits_shelf && c->outbox_bytes == 0) {
        if (held(c) <= 0 || shelf_has_room(c->shelf))
            return -1;
    } else if (waits_for_room && c->ring_bytes - held(c) >= 8) {
        return -1;
    }
    return reads || waits_for_room ? POLLIN : 0;
}

/* After a sleep: nobody needs to wake this end any more. */
void channel_awake(struct channel *c) {
    if (c->in != NULL) {
        atomic_store_explicit(&c->in->reader_sleeps, 0, memory_order_relaxed);
        atomic_store_explicit(&c->out->writer_sleeps, 0, memory_order_relaxed);
    }
}

/* Free what has grown. */
void channel_release(struct channel *c) {
    free(c->outbox);
    c->outbox = NULL;
    c->outbox_bytes = c->outbox_room = 0;
}

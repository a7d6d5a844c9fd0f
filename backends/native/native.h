/* The data path of a process group: frames over channels, graphs of actions, sums. No Python in here.

   "C does the bytes, Python does the words": whatever is rare (a peer that goes or gives up, frames that are
   not what is due, copies of a device, deadlines) ends a call with a code, and Python
   goes on from there. Nothing blocks but the one sleep of `run_advance`. The structures are mirrored, field by
   field, in `library.py`. */

#ifndef ARBORCAST_NATIVE_H
#define ARBORCAST_NATIVE_H

#include <poll.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* A digest of the sources without this line: who runs knows whether the library was built of them. A test says it. */
#define SOURCES 0xf5ee573

/* ---------------------------------------------------------------- channels: bytes in order to one other rank

   Both directions carry frames: a header of 8 bytes (code, three zeros, length), then as many bytes.

       header | part's bytes | trailer | header | part's bytes | trailer | header | opening | ...
       header | place on the shelf | trailer | ...

   A message is cut into parts of `part_bytes` from its start (the last is shorter). The trailer of a part (1
   to 8 bytes, so that every frame is a multiple of 8 long) ends with 1 if the part is what it should be. A
   rank that gives up within a part fills it up with zeros, the trailer too, and can still say why: the last
   byte of a part counts as received only with a good trailer, so that no such message is ever complete.

   Through memory, what goes to several ranks may lie on the sender's shelf, which all of them see: it is copied
   there once, and each is sent its place. Such a part is as long as the one that is due, or as a place.

   Whatever a peer sends, and writes where both can, nothing is read or written beyond what belongs to the
   channel: a header that is none is refused before its length is used (`frames.c` among the tests tries). */

enum frame_code { PART = 1, LAID = 2, OPENING = 5, ABORT = 6, BYE = 7 };
enum { HEADER_BYTES = 8, OPENING_BYTES = 64, REASON_BYTES = 2048, LANDING_BYTES = 256 << 10 };

/* What calls on channels return where they do not return a number of bytes. */
enum trouble {
    CLOSED = -1,     /* the peer is gone: `gone` says how */
    DISAGREES = -2,  /* the next frame, `code` and `length`, is not what is due */
    STRANGE = -3,    /* what comes, `header`, is no frame */
    NO_MEMORY = -4,
    BROKEN = -5,     /* the head of a ring cannot be what it is */
};

enum gone { HERE = 0, DIED = 1, LEFT = 2, GAVE_UP = 3 };

/* One direction of a channel through shared memory: a ring of bytes behind this, at the next page. */
struct ring {
    _Alignas(64) _Atomic uint64_t head; /* bytes ever written; the writer's */
    _Alignas(64) _Atomic uint64_t tail; /* bytes ever read; the reader's */
    _Alignas(64) _Atomic uint32_t reader_sleeps, writer_sleeps; /* who wants a byte over the socket */
};
enum { RING_AT = 4096, SHELF_AT = 4096 };

/* One writer, many readers: places for parts, that all ranks of a host see. The memory begins with a count for
   every place of those who have been sent it and have not read it; the writer lays anew where it is 0. */
enum { SHELF_PLACES = 32 };
struct readers {
    _Alignas(64) _Atomic uint32_t count;
};
struct shelf {
    struct readers *readers;
    int64_t place_bytes; /* the same on all ranks */
    int64_t least_bytes; /* what is shorter is sent to each: it costs less than a place */
    int64_t next;        /* of all that was ever laid, the number of what is laid next */
    int64_t run;         /* what was laid in others is of no use in this one */
    struct {
        int64_t run, share, at, size;
    } lies[SHELF_PLACES];
};

int32_t shelf_lay(struct shelf *, int64_t share, int64_t at, const uint8_t *data, int64_t size);
int32_t shelf_has_room(const struct shelf *);
uint8_t *shelf_place(struct readers *, int64_t place_bytes, int64_t place);

struct moment { /* bytes that went (or, negative, came) at a time of CLOCK_MONOTONIC */
    double seconds;
    int64_t bytes;
};

struct channel {
    int32_t fd;
    int32_t gone;
    int64_t part_bytes;
    int64_t ring_bytes;              /* 0 where bytes go through the socket */
    struct ring *out, *in;
    struct shelf *shelf;             /* this rank's; NULL where there is none */
    struct readers *their_shelf;     /* the memory of the peer's, NULL where there is none */
    int64_t place_bytes;             /* of its places */
    uint8_t *landing;                /* LANDING_BYTES for what a read brings beyond what was asked for */
    int64_t most;                    /* bytes that one system call, or one look at the ring, moves; for tests */
    struct moment *moments;          /* what has moved, for who wants a record; NULL else */
    int64_t moments_room, moments_count;
    int64_t moved;                   /* bytes of messages, in both directions, so far */
    /* sending */
    uint8_t *outbox;                 /* begun frames, openings: what must go before anything else */
    int64_t outbox_bytes, outbox_room;
    int64_t owed;                    /* bytes of a part that the caller still has, its header being sent */
    int32_t owed_trailer;
    int32_t is_full;                 /* nothing more goes until there is room */
    int32_t awaits_shelf;            /* which must be on the shelf */
    int32_t place;                   /* of the part that has begun, -1 where it comes through the ring */
    /* receiving */
    int64_t landed_at, landed_end;   /* unread bytes in `landing` */
    int64_t part_left;               /* bytes of the part that has begun, to come */
    int32_t trailer_left;            /* bytes of its trailer, to come; not 0 within a part, -1 after a bad one */
    int32_t header_have;             /* bytes of the next header */
    int32_t opening_have;            /* bytes of an opening that has begun */
    int32_t is_dry;                  /* nothing more comes until the descriptor is readable */
    int32_t low_water;               /* SO_RCVLOWAT as it is */
    int32_t code, length;            /* of the last header */
    int32_t due;                     /* length of the part that was due instead */
    int64_t missing;                 /* bytes that would let the receiver go on */
    int32_t words_have, reason_have; /* bytes of the last words: of their header, and of the reason */
    uint8_t header[HEADER_BYTES];
    uint8_t opening[OPENING_BYTES];
    uint8_t words[HEADER_BYTES];
    uint8_t reason[REASON_BYTES];
};

int32_t channel_open(struct channel *, const uint8_t *opening, int32_t follows);
int64_t channel_send(struct channel *, const uint8_t *data, int64_t size);
int64_t channel_send_laid(struct channel *, int64_t share, int64_t at, const uint8_t *data, int64_t size);
int64_t channel_receive(struct channel *, uint8_t *into, int64_t size);
int32_t channel_opening(struct channel *);
int32_t channel_look(struct channel *);
int32_t channel_wanted(struct channel *, int32_t reads, int32_t sends);
void channel_awake(struct channel *);
int32_t channel_last_words(struct channel *);
void channel_release(struct channel *);

/* ------------------------------------------------------------------------------------------------ arithmetic

   out[i] = a[i] with b[i]; `out` may be `a`. Addresses need not be aligned. */

typedef void combine(void *out, const void *a, const void *b, int64_t count);
combine *find_combine(int32_t type, int32_t operator); /* NULL where there is none */

/* ------------------------------------------------------------- the loop: see `run.py` for what it is part of */

struct message { /* bytes that are handed over to a channel */
    const uint8_t *data;
    int64_t size;
};
int64_t channel_send_all(struct channel *, const struct message *, int32_t count, int64_t skipped);
int64_t channel_combine(struct channel *, uint8_t *out, const uint8_t *with, int64_t size, combine *,
                        int64_t item_bytes);

enum act { SEND, RECEIVE, COMBINE, REDUCE, COPY };

struct action {
    int32_t act;
    int32_t peer;                        /* place among the run's peers, -1 for what is local */
    int32_t into_buffer, source_buffer;  /* places in `memory` */
    int64_t into, source, length;        /* elements */
    int32_t first_waiter, waiters;       /* in `graph.waiters` */
    int32_t share;                       /* the same of all sends of the same bytes; -1 where there are no others */
};

struct graph { /* what one rank does in a collective; never written to */
    int32_t actions, peers;
    const struct action *action;
    const int32_t *waits;    /* of every action: how many others must be complete before */
    const int32_t *waiters;
    const int32_t *orders;   /* actions that send to, and that receive from, each peer, in order */
};

struct peer {
    struct channel *channel;
    int32_t first_send, sends, first_receive, receives; /* in `graph.orders` */
    int32_t told, awaited;   /* numbers of the openings that it is sent and that it must send, 0 for none */
    int32_t awaits_opening;  /* still */
    int32_t sent, received;  /* actions that are complete */
    int64_t outgoing, incoming; /* bytes of the next ones that are done */
    int32_t is_gone;         /* it will send no more than is on its way */
};

/* What ends a call of `run_advance`. */
enum run_event {
    OVER,        /* all is complete here and handed over */
    WOKE,        /* something moved: when the time was over, or all was over already */
    TIMED,       /* the time is over, and nothing could be done at its end */
    INTERRUPTED, /* a signal came */
    STEPPED,     /* something has moved, and `steps` is set */
    RUNG,        /* the bell */
    ENDED,       /* `asked_peer` hung up */
    FAILED,      /* a call on the channel of `asked_peer` returned `trouble` */
    DIFFERS,     /* the opening of `asked_peer` is another one */
};

struct run {
    const struct graph *graph;
    struct peer *peers;          /* those of the graph, then the other ones there are */
    int32_t peer_count;
    int32_t missing;             /* actions and openings that keep the run from ending */
    int32_t *left;               /* for every action what it still waits for */
    int32_t *local;              /* local actions that may start: a ring as long as there are actions */
    int32_t local_first, local_count;
    uint8_t *memory[3];
    int64_t item_bytes;
    combine *combine;            /* NULL where the graph has no reductions */
    const uint8_t *openings;     /* the first has number 1 */
    struct pollfd *polls;        /* one more than peers */
    int32_t bell;                /* descriptor */
    int32_t steps;               /* whether to return whenever something has moved; for tests */
    int32_t progress;            /* whether anything moved in this round of work */
    int32_t moved;               /* whether anything did since Python set it to 0 */
    int32_t asked_peer, trouble;
};

int32_t run_begin(struct run *);
int32_t run_advance(struct run *, int32_t patience_ms, int32_t lingers);
int64_t native_layout(int32_t which);
int64_t native_sources(void);

#endif

/* A shelf: memory that one rank writes and all others of its host read; see `native.h`. */

#include <string.h>

#include "native.h"

/* Where a place begins, in the memory of a shelf. */
uint8_t *shelf_place(struct readers *memory, int64_t place_bytes, int64_t place) {
    return (uint8_t *)memory + SHELF_AT + place * place_bytes;
}

int32_t shelf_has_room(const struct shelf *s) {
    return atomic_load(&s->readers[s->next % SHELF_PLACES].count) == 0;
}

/* The place where these bytes lie, after laying them there if they did not; -1 where there is no room.

   Args: which bytes of this run they are: the number of what is shared, and where in it they begin. */
int32_t shelf_lay(struct shelf *s, int64_t share, int64_t at, const uint8_t *data, int64_t size) {
    for (int64_t number = s->next - 1; number >= 0 && number >= s->next - SHELF_PLACES; number--) {
        int64_t place = number % SHELF_PLACES;
        if (s->lies[place].run != s->run)
            break; /* and all before it are older */
        if (s->lies[place].share == share && s->lies[place].at == at && s->lies[place].size == size)
            return (int32_t)place;
    }
    if (!shelf_has_room(s))
        return -1;
    int64_t place = s->next++ % SHELF_PLACES;
    memcpy(shelf_place(s->readers, s->place_bytes, place), data, (size_t)size);
    s->lies[place].run = s->run;
    s->lies[place].share = share;
    s->lies[place].at = at;
    s->lies[place].size = size;
    return (int32_t)place;
}

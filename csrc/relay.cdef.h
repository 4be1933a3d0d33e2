/* Streams on their way through the router while nothing in them needs judging (router/http/relay.py). */

struct penstock_lane {
    int from, to;
    int64_t num_events; /* that have passed */
};

struct penstock_relay {
    int epoll; /* that knows `from` of each lane, and the lane by it */
    uint8_t *data;
    size_t room;
    size_t size, passed, sent; /* of what was read for the lane that is returned: its bytes, those that were to pass, that did */
};

/* From one socket to another, which do not block; 1, or 0 where there is no descriptor left. The lane has both under
 * numbers of its own: a loop closes its own before it says so, and such a number is soon another connection's. */
int penstock_relay_open(struct penstock_relay *relay, struct penstock_lane *lane, int from, int to);
void penstock_relay_close(struct penstock_relay *relay, struct penstock_lane *lane);

/* Read once from each lane that has something, and write what are whole and ordinary chunks. NULL, or the first lane with
 * which more has to be done: bytes [sent, passed) are still to be written, [passed, size) to be looked at; none at all
 * where its socket has come to its end or broke, which it will say again. The lanes behind it are ready still. */
struct penstock_lane *penstock_relay_run(struct penstock_relay *relay);

/* A chunk of a stream costs a read, a write and, in Python, as much again as both do on a quiet machine: the loop's call, the
 * parser's three, the exchange's. Most chunks are alike: a size, an event, no end. Those pass here, a call for all streams
 * that have something. Whatever else comes (a chunk in two pieces, an extension, the end, a count of cached tokens) goes
 * back to the parser, which stands between two chunks, as it did when the stream was handed over. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "relay.cdef.h"

enum { MAX_READY = 64, MAX_SIZE_DIGITS = 6 };
static const char wanted[] = "\"cached_tokens\":"; /* router/exchange.py reads what follows */

static int digit(uint8_t c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* How many bytes of `data` are whole chunks with something in them. */
static size_t whole_chunks(const uint8_t *data, size_t size) {
    for (size_t begin = 0;;) {
        size_t length = 0, at = begin;
        for (; at < size && at - begin < MAX_SIZE_DIGITS && digit(data[at]) >= 0; at++)
            length = 16 * length + (size_t)digit(data[at]);
        if (length == 0 || size - at < length + 4 || memcmp(data + at, "\r\n", 2)) return begin;
        if (memcmp(data + at + 2 + length, "\r\n", 2)) return begin;
        begin = at + length + 4;
    }
}

/* As router/exchange.py counts them: by their empty lines, in what has none as one. */
static int64_t num_events(const uint8_t *data, size_t size) {
    int64_t count = 0;
    for (const uint8_t *at = data, *end = data + size; (at = memmem(at, (size_t)(end - at), "\n\n", 2)); at += 2) count++;
    return count ? count : 1;
}

/* Whether all that was read has gone on. */
static int pass(struct penstock_relay *relay, struct penstock_lane *lane) {
    ssize_t got = recv(lane->from, relay->data, relay->room, MSG_DONTWAIT);
    relay->size = got > 0 ? (size_t)got : 0;
    relay->passed = relay->sent = 0;
    if (got <= 0 || memmem(relay->data, relay->size, wanted, sizeof wanted - 1)) return 0;
    if ((relay->passed = whole_chunks(relay->data, relay->size)) == 0) return 0;
    lane->num_events += num_events(relay->data, relay->passed);
    ssize_t sent = send(lane->to, relay->data, relay->passed, MSG_DONTWAIT | MSG_NOSIGNAL);
    relay->sent = sent > 0 ? (size_t)sent : 0;
    return relay->sent == relay->size;
}

int penstock_relay_open(struct penstock_relay *relay, struct penstock_lane *lane, int from, int to) {
    struct epoll_event reading = {.events = EPOLLIN, .data.ptr = lane};
    lane->from = fcntl(from, F_DUPFD_CLOEXEC, 0);
    lane->to = fcntl(to, F_DUPFD_CLOEXEC, 0);
    if (lane->from >= 0 && lane->to >= 0 && !epoll_ctl(relay->epoll, EPOLL_CTL_ADD, lane->from, &reading)) return 1;
    if (lane->from >= 0) close(lane->from);
    if (lane->to >= 0) close(lane->to);
    return 0;
}

void penstock_relay_close(struct penstock_relay *relay, struct penstock_lane *lane) {
    epoll_ctl(relay->epoll, EPOLL_CTL_DEL, lane->from, NULL);
    close(lane->from);
    close(lane->to);
}

struct penstock_lane *penstock_relay_run(struct penstock_relay *relay) {
    struct epoll_event ready[MAX_READY];
    int count = epoll_wait(relay->epoll, ready, MAX_READY, 0);
    for (int i = 0; i < count; i++) {
        struct penstock_lane *lane = ready[i].data.ptr;
        if (!pass(relay, lane)) return lane;
    }
    return NULL;
}

/* A parser for plain HTTP messages: a request line, about a dozen ordinary headers, a length, the body. Most messages
 * are plain, and one pass here replaces a callback into Python per header. Everything unusual (a transfer coding, a
 * second length, extra spaces, a hop-by-hop header) is not plain and left to llhttp and router/http/edge.py. This
 * parser may only accept what they accept, with the same meaning; tests/router/test_heads.py checks that. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "http_head.cdef.h"

enum { MAX_LENGTH_DIGITS = 9 };
enum kind { PASSES, HOST, LENGTH, AUTHORIZATION, TYPE, SESSION, CONNECTION, CACHED, UNUSUAL };

struct span {
    int32_t begin, end;
};

struct head {
    const uint8_t *data;
    size_t size, at; /* at: bytes parsed so far */
    uint8_t *lines;
    size_t lines_size, limit; /* limit: the largest offset of the end of the head */
    int64_t length; /* length of the body */
    struct span values[UNUSUAL];
};

static const uint8_t name_chars[256] = {
    ['!'] = 1, ['#'] = 1, ['$'] = 1, ['%'] = 1, ['&'] = 1, ['\''] = 1, ['*'] = 1, ['+'] = 1, ['-'] = 1, ['.'] = 1,
    ['^'] = 1, ['_'] = 1, ['`'] = 1, ['|'] = 1, ['~'] = 1, ['0' ... '9'] = 1, ['a' ... 'z'] = 1, ['A' ... 'Z'] = 1};

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static int is_name(const uint8_t *name, size_t size, const char *expected) {
    return size == strlen(expected) && memcmp(name, expected, size) == 0;
}

static int begins(const uint8_t *name, size_t size, const char *expected) {
    return size >= strlen(expected) && memcmp(name, expected, strlen(expected)) == 0;
}

static enum kind kind_of(const uint8_t *name, size_t size) {
    switch (name[0]) {
    case 'a': return is_name(name, size, "authorization") ? AUTHORIZATION : PASSES;
    case 'c':
        if (is_name(name, size, "content-length")) return LENGTH;
        if (is_name(name, size, "content-type")) return TYPE;
        return is_name(name, size, "connection") ? CONNECTION : PASSES;
    case 'e': return is_name(name, size, "expect") ? UNUSUAL : PASSES;
    case 'h': return is_name(name, size, "host") ? HOST : PASSES;
    case 'k': return is_name(name, size, "keep-alive") ? UNUSUAL : PASSES;
    case 'p': return begins(name, size, "proxy-") ? UNUSUAL : PASSES;
    case 't': /* traceparent and tracestate are forwarded */
        if (is_name(name, size, "te") || begins(name, size, "transfer-")) return UNUSUAL;
        return is_name(name, size, "trailer") ? UNUSUAL : PASSES;
    case 'u': return is_name(name, size, "upgrade") ? UNUSUAL : PASSES;
    case 'x':
        if (is_name(name, size, "x-session-id")) return SESSION;
        if (is_name(name, size, "x-penstock-cached-tokens")) return CACHED;
        return begins(name, size, "x-penstock-") || is_name(name, size, "x-api-key") ? UNUSUAL : PASSES;
    default: return PASSES;
    }
}

/* `forwarded`: bitmask of the kinds whose lines are forwarded. */
static int read_line(struct head *head, unsigned forwarded) {
    const uint8_t *data = head->data;
    size_t at = head->at, end;
    size_t limit = head->limit;
    uint8_t *line = head->lines + head->lines_size; /* `lines` never grows faster than `data` is read */
    for (end = at; end < limit && name_chars[data[end]]; end++)
        line[end - at] = data[end] >= 'A' && data[end] <= 'Z' ? data[end] | 0x20 : data[end];
    size_t name_size = end - at, value_at = end + 2;
    if (name_size == 0 || value_at >= limit || data[end] != ':' || data[end + 1] != ' ') return 0;
    for (end = value_at; end < limit && data[end] != '\r'; end++)
        if ((data[end] < ' ' && data[end] != '\t') || data[end] == 0x7f) return 0;
    if (end + 1 >= limit || data[end + 1] != '\n' || end == value_at) return 0;
    if (data[value_at] <= ' ' || data[end - 1] <= ' ') return 0;
    enum kind kind = kind_of(line, name_size);
    if (kind == UNUSUAL) return 0;
    if (kind != PASSES) {
        if (head->values[kind].end) return 0; /* given twice */
        head->values[kind] = (struct span){(int32_t)value_at, (int32_t)end};
    }
    if (forwarded >> kind & 1) {
        memcpy(line + name_size, data + at + name_size, end + 2 - at - name_size);
        head->lines_size += end + 2 - at;
    }
    head->at = end + 2;
    return 1;
}

static int read_length(struct head *head) {
    struct span value = head->values[LENGTH];
    if (!value.end || value.end - value.begin > MAX_LENGTH_DIGITS) return 0;
    head->length = 0;
    for (int32_t at = value.begin; at < value.end; at++) {
        if (head->data[at] < '0' || head->data[at] > '9') return 0;
        head->length = 10 * head->length + (head->data[at] - '0');
    }
    return 1;
}

static int stays_open(const struct head *head) {
    static const char keep_alive[] = "keep-alive";
    struct span value = head->values[CONNECTION];
    if (!value.end) return 1;
    if (value.end - value.begin != sizeof keep_alive - 1) return 0;
    for (size_t i = 0; i < sizeof keep_alive - 1; i++)
        if ((head->data[(size_t)value.begin + i] | 0x20) != (keep_alive[i] | 0x20)) return 0;
    return 1;
}

/* Parse all headers; check that the body has the declared length and is complete. */
static int read_headers(struct head *head, unsigned forwarded) {
    while (head->at + 1 < head->limit && head->data[head->at] != '\r')
        if (!read_line(head, forwarded)) return 0;
    if (head->at + 1 >= head->limit || head->data[head->at + 1] != '\n') return 0;
    head->at += 2;
    return read_length(head) && stays_open(head) && head->size - head->at == (size_t)head->length;
}

int penstock_plain_request(const uint8_t *data, size_t size, int32_t *parsed, uint8_t *lines, size_t room) {
    static const char method[] = "POST /", version[] = " HTTP/1.1\r\n";
    if (size > INT32_MAX || size < sizeof method || memcmp(data, method, sizeof method - 1)) return 0;
    size_t end = sizeof method - 1;
    while (end < size && data[end] > ' ' && data[end] < 0x7f && data[end] != '#') end++;
    if (size - end < sizeof version - 1 || memcmp(data + end, version, sizeof version - 1)) return 0;
    struct head head = {.data = data, .size = size, .at = end + sizeof version - 1, .lines = lines,
                        .limit = smaller(size, room)};
    if (!read_headers(&head, 1u << PASSES | 1u << SESSION)) return 0;
    if (!head.values[HOST].end || head.values[CACHED].end) return 0;
    const struct span values[] = {head.values[AUTHORIZATION], head.values[TYPE], head.values[SESSION]};
    parsed[0] = (int32_t)end;
    parsed[1] = (int32_t)head.at;
    parsed[2] = (int32_t)head.lines_size;
    memcpy(parsed + 3, values, sizeof values);
    return 1;
}

int penstock_plain_response(const uint8_t *data, size_t size, int32_t *parsed, uint8_t *lines, size_t room) {
    static const char version[] = "HTTP/1.1 ";
    if (size > INT32_MAX || size < 15 || memcmp(data, version, sizeof version - 1)) return 0;
    int32_t status = 0;
    size_t end = sizeof version - 1;
    for (; end < sizeof version + 2; end++) {
        if (data[end] < '0' || data[end] > '9') return 0;
        status = 10 * status + (data[end] - '0');
    }
    if (status < 200 || status > 599 || status == 204 || status == 304 || data[end++] != ' ') return 0;
    while (end < size && data[end] >= ' ' && data[end] < 0x7f) end++;
    if (size - end < 2 || data[end] != '\r' || data[end + 1] != '\n') return 0;
    struct head head = {.data = data, .size = size, .at = end + 2, .lines = lines, .limit = smaller(size, room)};
    const unsigned dropped = 1u << CONNECTION | 1u << CACHED;
    if (!read_headers(&head, ~dropped)) return 0;
    parsed[0] = status;
    parsed[1] = (int32_t)head.at;
    parsed[2] = (int32_t)head.lines_size;
    memcpy(parsed + 3, &head.values[CACHED], sizeof head.values[CACHED]);
    return 1;
}

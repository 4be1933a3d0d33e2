/* Heads of plain HTTP/1.1 messages (router/http/heads.py): those in which nothing needs judging. */

/* `data` is one whole request to be passed on: POST, a Content-Length that is right, nothing doubtful. 1, or 0: it is for
 * the real parser to say what it is. `found`, as offsets into `data`: end of the target (which begins at 5), begin of the
 * body, size of `lines`, then begin and end of the values of Authorization, Content-Type and X-Session-Id, 0 and 0 where
 * not given. `lines` receives the headers that may pass, as they are written; a head larger than `room`, its size, is not
 * plain. */
int penstock_plain_request(const uint8_t *data, size_t size, int32_t *found, uint8_t *lines, size_t room);

/* `data` is one whole answer with a Content-Length. `found`: status, begin of the body, size of `lines`, begin and end of
 * the value of X-Penstock-Cached-Tokens. */
int penstock_plain_answer(const uint8_t *data, size_t size, int32_t *found, uint8_t *lines, size_t room);

/* Parsing of plain HTTP/1.1 messages (router/http/heads.py), those without unusual features. */

/* Return 1 if `data` is one complete plain POST with a correct Content-Length, 0 if the full parser has to decide.
 * `parsed`, as offsets into `data`: end of the target (which begins at 5), begin of the body, size of `lines`, then
 * begin and end of the values of Authorization, Content-Type and X-Session-Id, 0 and 0 if missing. `lines` receives the
 * header lines to forward; a head larger than `room`, its size, is not plain. */
int penstock_plain_request(const uint8_t *data, size_t size, int32_t *parsed, uint8_t *lines, size_t room);

/* The same for a complete response with a Content-Length. `parsed`: status, begin of the body, size of `lines`, begin
 * and end of the value of X-Penstock-Cached-Tokens. */
int penstock_plain_response(const uint8_t *data, size_t size, int32_t *parsed, uint8_t *lines, size_t room);

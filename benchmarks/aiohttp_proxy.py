"""A plain reverse proxy of aiohttp, for comparison: `python aiohttp_proxy.py BACKEND_PORT` prints its own port.

It does the least that such a proxy can: no routing, no limits, no retries; uvloop where there is one.
"""

import asyncio
import sys

from aiohttp import ClientSession, TCPConnector, web


async def main() -> None:
    target = f"http://127.0.0.1:{sys.argv[1]}"
    session = ClientSession(connector=TCPConnector(limit=0), auto_decompress=False)

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with session.request(request.method, target + request.path_qs, data=body, headers=headers) as answer:
            if "event-stream" not in answer.headers.get("content-type", ""):
                return web.Response(
                    body=await answer.read(), status=answer.status, content_type=answer.headers["content-type"]
                )
            response = web.StreamResponse(status=answer.status, headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.run(main())
    except ImportError:
        asyncio.run(main())

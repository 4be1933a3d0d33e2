#!/bin/sh
# The entry point of the images. TRITON_CACHE_DIR may be on a volume that hides the image's own folder, or was filled by
# another image, so the kernels that were compiled with this image are added to it. Then this process becomes penstock.
compiled=$(dirname "$0")/../triton
if [ -d "$compiled" ] && mkdir -p "$TRITON_CACHE_DIR"; then
    cp -rn "$compiled/." "$TRITON_CACHE_DIR"
fi
exec penstock "$@"

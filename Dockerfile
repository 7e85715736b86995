# Native image input for DeepSeek-V4-Flash-Vision-Exp, baked into any text-only vLLM image:
#   docker build --build-arg BASE_IMAGE=<your vLLM image, pinned by digest> -t vllm-vision-exp .
# Built from the bundle (hotfix.py bundle), it needs no network.
ARG BASE_IMAGE
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS patched
# Root may write the installation; the result has the base image's user, since it starts from that.
# hadolint ignore=DL3002
USER 0
# Byte code and caches that the run cleared stay in the base: Python compares dates, vLLM digests.
RUN --mount=type=bind,target=/tmp/deepseek-v4-vision-exp \
    touch /tmp/before && mkdir /changed \
    && bash /tmp/deepseek-v4-vision-exp/run.sh \
    && python3 /tmp/deepseek-v4-vision-exp/hotfix.py verify \
    && find / -xdev \( -path /changed -o -path /tmp -o -path /proc -o -path /sys -o -path /dev \
        -o -path /run -o -path /etc -o -path /var \) -prune -o -type f -cnewer /tmp/before \
        -exec cp -a --parents -t /changed {} +
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
# One layer: the four files of vLLM, the receipt and the overlay, with their owners.
COPY --from=patched /changed /

# Native image input for DeepSeek-V4-Flash-Vision-Exp, baked into any text-only vLLM image:
#   docker build --build-arg BASE_IMAGE=<your vLLM image, pinned by digest> -t vllm-vision-exp .
# Built from the bundle (hotfix.py bundle), it needs no network.
ARG BASE_IMAGE
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
# One layer: the sources are only read while it is built, the overlay and the receipt stay.
# hadolint ignore=DL3002
USER 0
RUN --mount=type=bind,target=/tmp/deepseek-v4-vision-exp \
    bash /tmp/deepseek-v4-vision-exp/run.sh \
    && python3 /tmp/deepseek-v4-vision-exp/hotfix.py verify

"""A caller that is there to be killed: `python -m tests.server.victim TARGET unary|stream PROMPT MAX_TOKENS`."""

import sys

import grpc

from jaxoverlap.v1 import generate_service_pb2 as pb
from jaxoverlap.v1 import generate_service_pb2_grpc


def main() -> None:
    target, kind, prompt, max_tokens = sys.argv[1:]
    given = pb.Generation(text=prompt, stop={"max_tokens": int(max_tokens), "ignore_eos": True})
    stub = generate_service_pb2_grpc.GenerateServiceStub(grpc.insecure_channel(target))
    if kind == "unary":
        stub.Generate(pb.GenerateRequest(generation=given))
    else:
        list(stub.GenerateStream(pb.GenerateStreamRequest(generation=given)))


if __name__ == "__main__":
    main()

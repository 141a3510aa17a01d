"""Between the package's types and the service's messages, both ways; server and client share it.

    requests   prompts, `SamplingParams`, `RequestOptions`   ↔  `Generation`
    answers    `RequestOutput` and what it is made of        ↔  `GenerateResponse` and the events of a stream
    statuses   the exceptions of `jaxoverlap.errors`         ↔  `google.rpc.Status` with its details

Nothing here does I/O, and nothing imports grpc: protobuf is enough.
"""

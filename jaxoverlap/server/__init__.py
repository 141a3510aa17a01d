"""The gRPC service: front ends that speak with callers, and the supervisor that starts and ends all processes.

    supervisor ──┬── engine process     one thread, the scheduler and JAX       `jaxoverlap.engine.core_process`
                 └── front end 0 … N    grpc.aio, tokens to text and back       `jaxoverlap.server.frontend_process`

Every front end has a socket to the engine and one to the supervisor; the end of a socket is how they notice a death.
"""

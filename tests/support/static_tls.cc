// A library that takes 64 bytes of static TLS, the memory that the loader keeps for each thread.

static thread_local char memory[64] __attribute__((tls_model("initial-exec")));

extern "C" char* static_tls() { return memory; }

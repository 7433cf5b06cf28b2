// Nothing: what a kernel costs by itself. For benches.
extern "C" __global__ void empty() {}

// What kernels of cooperative matrices ask for. Linked in front of all else.

enable f16;
enable wgpu_cooperative_matrix;

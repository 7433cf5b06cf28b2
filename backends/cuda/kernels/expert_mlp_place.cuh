// Where the records of experts lie, and what lies where in them.
#pragma once
#include "scaled.cuh"

// Where the parts of a matrix start in a record, in bytes; scales and globals where the format has them.
struct ExpertBanks {
  u32 codes;
  u32 scales;
  u32 globals;
};

// Passed by value. Slot s is record s % slots_per_chunk of chunk s / slots_per_chunk. Behind the n_slots slots of the pool
// lies the layer's bank, mapped: expert e is slot n_slots + e there.
struct ExpertPlace {
  u32 format;
  u32 n_slots;
  u32 slots_per_chunk;
  u32 record_bytes;
  ExpertBanks gate, up, down;
};

// Where to find the expert of a route: its slot, its record in the bank where the op reads that in place, or -1 for nowhere.
__device__ __forceinline__ int slot_of(const ExpertMlpParams& p, const ExpertPlace& place, const int* table, int id) {
  if (id < 0) return -1;
  const int slot = table[id];
  return slot < 0 && p.in_place == 1 ? (int)place.n_slots + id : slot;
}

// The record of an expert that has a slot.
__device__ __forceinline__ const u8* record_of(const ExpertPlace& place, const u64* chunks, u32 slot) {
  return (const u8*)chunks[slot / place.slots_per_chunk] + (i64)(slot % place.slots_per_chunk) * place.record_bytes;
}

// One of its matrices.
__device__ __forceinline__ Stored matrix_of(const ExpertPlace& place, const u8* record, const ExpertBanks& banks) {
  return {record + banks.codes, record + banks.scales,
          place.format == FORMAT_NVFP4 ? (const float*)(record + banks.globals) : nullptr};
}
